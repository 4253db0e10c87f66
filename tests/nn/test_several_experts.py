# SPDX-License-Identifier: Apache-2.0
"""Several experts a row from the strategies: outputs, capacity, evaluation, and exact gradients of the whole layer."""

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equipoise.estimators import STRATEGIES, Noise
from equipoise.nn import MoE, Routing, SamplingRule, Surrogate, capture

EXACT = 1e-12
EXPERTS = 3
DECISIVE = 60.0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small batches only wait for a second thread."""
    torch.set_num_threads(1)


def layer(router: Any = "skip-iw", num_experts: int = 4, **how: Any) -> MoE:
    torch.manual_seed(1)
    how.setdefault("top_k", 2)
    return MoE(6, num_experts, hidden_dim=8, router=router, **how)


def run(moe: MoE, x: Tensor) -> tuple[Tensor, Routing]:
    torch.manual_seed(2)
    with capture(moe) as routings:
        y = moe(x)
    return y, routings[0]


def each_expert(moe: MoE, x: Tensor) -> Tensor:
    """The output of every expert for every row, [T, E, dim]."""
    experts: Any = moe.experts
    hidden = nn.functional.gelu(torch.einsum("td,ehd->teh", x, experts.up) + experts.up_bias)
    return torch.einsum("teh,edh->ted", hidden, experts.down) + experts.down_bias


# --- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["sample", "gm-iw", "gm-iw-avg-mix"])
@pytest.mark.parametrize("training", [True, False])
def test_reinforce_averages_the_experts(router: str, training: bool) -> None:
    moe, x = layer(router, top_k=3, loss="reinforce").train(training), torch.randn(12, 6)
    y, routing = run(moe, x)
    chosen = each_expert(moe, x).gather(1, routing.indices[..., None].expand(-1, -1, 6))
    torch.testing.assert_close(y, chosen.mean(1))
    torch.testing.assert_close(routing.scores, torch.full([12, 3], 1 / 3))


@pytest.mark.parametrize("training", [True, False])
def test_gating_adds_up_gated_experts(training: bool) -> None:
    moe, x = layer("gm-iw", loss="gating").train(training), torch.randn(12, 6)
    y, routing = run(moe, x)
    p = routing.log_p.exp().gather(1, routing.indices)
    torch.testing.assert_close(routing.scores, p)  # of all experts, not renormalised over the two
    chosen = each_expert(moe, x).gather(1, routing.indices[..., None].expand(-1, -1, 6))
    torch.testing.assert_close(y, (p[..., None] * chosen).sum(1))


@pytest.mark.parametrize("loss", ["reinforce", "gating", "gated-reinforce"])
def test_evaluation_takes_the_most_probable(loss: str) -> None:
    moe = layer("skip-iw", loss=loss).eval()
    _, routing = run(moe, torch.randn(10, 6))
    assert torch.equal(routing.indices, routing.logits.topk(2).indices)
    assert routing.samples == ()
    priced = run(layer("skip-iw", loss=loss, evaluation="priced").eval(), torch.randn(10, 6))[1]
    gates = priced.log_p.exp().gather(1, priced.indices)
    torch.testing.assert_close(priced.scores, torch.full([10, 2], 0.5) if loss == "reinforce" else gates)


def test_capacity_is_that_of_all_rounds() -> None:
    x = torch.randn(24, 6)
    for router in ("skip-iw", "gm-iw"):
        moe = layer(router, capacity_factor=1.0)
        with torch.no_grad():
            moe.router.weight[0] += 3 * moe.router.weight[1].abs()
        _, routing = run(moe, x)
        assert routing.capacity == 12  # twice ceil(24 / 4)
        assert int(routing.stats.load.max()) <= 12
        if router == "gm-iw":
            assert routing.stats.load.tolist() == [12] * 4
            assert routing.exactly_balanced


@pytest.mark.parametrize("router", ["skip-iw", "topk"])
def test_capacity_in_evaluation_is_for_all_experts_of_a_row(router: str) -> None:
    moe = layer(router, eval_capacity_factor=1.0).eval()
    _, routing = run(moe, torch.randn(24, 6))
    assert routing.capacity == 12
    assert int(routing.stats.load.max()) <= 12


def test_a_row_that_one_round_drops_has_no_weight_and_keeps_its_other_expert() -> None:
    moe = layer("skip-iw", loss="reinforce", capacity_factor=0.5)
    _, routing = run(moe, torch.randn(40, 6))
    kept = routing.indices < 4
    assert torch.equal(routing.weight > 0, kept.all(1))
    assert torch.equal(routing.kept, kept.any(1))
    partly = kept.any(1) & ~kept.all(1)
    assert int(partly.sum()) > 3
    assert bool((routing.scores[partly].sum(1) == 0.5).all())


def test_record() -> None:
    _, routing = run(layer("gm-iw", top_k=3), torch.randn(12, 6))
    assert routing.sample is routing.samples[0]
    assert len(routing.samples) == 3
    assert torch.equal(torch.stack([s.z for s in routing.samples], 1), routing.indices)
    assert routing.gap is not None
    gaps = [s.gap for s in routing.samples if s.gap is not None]
    assert float(routing.gap) == pytest.approx(sum(map(float, gaps)), abs=1e-9)
    p, log_prob = routing.log_p.detach().exp(), routing.log_prob().detach()
    for row, chosen in enumerate(routing.indices.tolist()):
        chance, left = 1.0, 1.0
        for j in chosen:
            chance, left = chance * float(p[row, j]) / left, left - float(p[row, j])
        assert float(log_prob[row].exp()) == pytest.approx(chance, rel=1e-4)
    nothing = run(layer("gm-iw").eval(), torch.randn(3, 6))[1]
    assert nothing.log_prob().tolist() == [0.0] * 3


# --- gradient --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["gm-iw", "skip-iw-mix"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(router: str, reentrant: bool) -> None:
    gradients: list[list[Tensor]] = []
    for wrapped in (False, True):
        moe = layer(router)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        torch.manual_seed(5)
        with capture(moe) as routings:
            y: Any = checkpoint(moe, x, use_reentrant=reentrant) if wrapped else moe(x)
        loss = Surrogate(0.3)(y.square().sum(-1), routings)
        loss.backward()
        gradients.append([p.grad for p in (x, *moe.parameters()) if p.grad is not None])
    torch.testing.assert_close(*gradients)


class Played:
    """A strategy of the table whose noise is set from outside, one for each round."""

    def __init__(self, name: str) -> None:
        self._strategy = STRATEGIES[name]
        self.noises: list[Noise] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def draw_noise(self, shape: Sequence[int], **how: Any) -> Noise:
        return self.noises.pop(0)

    def draw(self, log_p: Tensor, noise: Noise, **how: Any) -> Any:
        return self._strategy.draw(log_p, noise, **how)


@pytest.fixture
def _unchecked() -> Iterator[None]:
    """Hundreds of tiny passes; signatures are checked in the other tests."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def play(played: Played, moe: MoE, x: Tensor, z: Sequence[Sequence[int]], order: Sequence[Sequence[float]]) -> Any:
    """One forward pass in which row i draws the experts z[i], with these priorities in each round."""
    for r, priority in enumerate(order):
        chosen = nn.functional.one_hot(torch.tensor([row[r] for row in z]), EXPERTS).double()
        played.noises.append(Noise(DECISIVE * chosen, torch.tensor(priority).double()))
    with capture(moe) as routings:
        y = moe(x)
    assert [s.z.tolist() for s in routings[0].samples] == [list(column) for column in zip(*z, strict=True)]
    return (x + y - 1.0).square().sum(-1), routings


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("loss", ["reinforce", "gating", "gated-reinforce"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_layer_is_exactly_unbiased(loss: str, temperature: float) -> None:
    """Two rows, three experts, one slot a round: every draw and every order of dropping, against the exact gradient."""
    x = torch.randn(2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    top_k = 2
    one_row = list(permutations(range(EXPERTS), top_k))
    orders = list(product([(0.0, 1.0), (1.0, 0.0)], repeat=top_k))
    results: list[list[Tensor]] = []
    for name in ("skip-iw", "sample"):
        torch.manual_seed(4)
        played = Played(name)
        rule = SamplingRule(played, loss=loss, top_k=top_k)
        how = {"capacity_factor": 1.0, "dtype": torch.float64, "temperature": temperature}
        moe = MoE(2, EXPERTS, hidden_dim=2, router=rule, **how)
        with torch.no_grad():
            for parameter in moe.parameters():
                parameter.copy_(torch.randn_like(parameter))
        objective, dropped = torch.zeros(()).double(), 0
        for z in product(one_row, repeat=2):
            p = moe.router.logits(x).softmax(-1)
            if name == "sample":  # the objective itself: nothing dropped, experts from the router
                losses, _ = play(played, moe, x, z, orders[0])
                chance = torch.stack([likelihood(p[i], z[i], 1.0) for i in range(2)]).prod()
                objective = objective + (chance.detach() if loss == "gating" else chance) * losses.mean()
                continue
            chance = torch.stack([likelihood(p[i], z[i], temperature) for i in range(2)]).prod().detach()
            for order in orders:
                losses, routings = play(played, moe, x, z, order)
                dropped += int((routings[0].weight == 0).sum())
                objective = objective + chance / len(orders) * Surrogate(0.7, weights="all")(losses, routings)
        assert (dropped > 0) == (name == "skip-iw")
        results.append(list(torch.autograd.grad(objective, list(moe.parameters()))))
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).abs().max()) < EXACT


@pytest.mark.usefixtures("_unchecked")
def test_two_gated_layers_with_the_score_function_are_exactly_unbiased() -> None:
    """One row, two layers of two experts out of three, off-policy: every draw, against the exact gradient."""
    torch.manual_seed(4)
    x, played = torch.randn(1, 2).double(), [Played("sample") for _ in range(2)]
    rules = [SamplingRule(strategy, loss="gated-reinforce", top_k=2) for strategy in played]
    how = {"hidden_dim": 2, "temperature": 0.6, "dtype": torch.float64, "upstream": True}
    moes = nn.ModuleList(MoE(2, EXPERTS, router=rule, **how) for rule in rules)
    with torch.no_grad():
        for parameter in moes.parameters():
            parameter.copy_(torch.randn_like(parameter))
    objective, estimate = torch.zeros(()).double(), torch.zeros(()).double()
    for z in product(permutations(range(EXPERTS), 2), repeat=2):
        for strategy, chosen in zip(played, z, strict=True):
            strategy.noises = [
                Noise(DECISIVE * nn.functional.one_hot(torch.tensor([j]), EXPERTS).double()) for j in chosen
            ]
        with capture(moes) as routings:
            h = (x + moes[0](x)).tanh()
            losses = (h + moes[1](h) - 1.0).square().sum(-1)
        p = [routing.log_p.exp()[0] for routing in routings]
        chances = [torch.stack([likelihood(*layer, t) for layer in zip(p, z, strict=True)]).prod() for t in (1.0, 0.6)]
        objective = objective + chances[0] * losses.mean()
        estimate = estimate + chances[1].detach() * Surrogate(0.7, weights="all")(losses, routings)
    parameters = list(moes.parameters())
    wanted = torch.autograd.grad(objective, parameters, retain_graph=True)
    for gradient, exact in zip(torch.autograd.grad(estimate, parameters), wanted, strict=True):
        assert float((gradient - exact).abs().max()) < EXACT


def likelihood(p: Tensor, z: Sequence[int], temperature: float) -> Tensor:
    """Of drawing z in this order, where each round is at a temperature."""
    chance, left = torch.ones(()).double(), torch.ones_like(p).bool()
    for j in z:
        q = torch.where(left, p, 0.0).pow(1 / temperature)
        chance = chance * q[j] / q.sum()
        left = left & (torch.arange(len(p)) != j)
    return chance
