# SPDX-License-Identifier: Apache-2.0
"""The training loop: updates after the optimiser's step, readouts that the surrogate owns, parts, balance losses."""

import copy
import warnings
from typing import Any

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from equipoise.nn import MoE, Readout, Readouts, ResidualBaseline, RoutingWarning, Surrogate, capture, parameter_groups

X = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(5, [3, 8], generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small batches only wait for a second thread."""
    torch.set_num_threads(1)


class Model(nn.Module):
    """Two residual blocks with experts, and a head."""

    def __init__(self, router: str = "skip-iw", second: str | None = None, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = (router, second or router)
        self.moes = nn.ModuleList(MoE(6, 4, hidden_dim=5, router=name, **how) for name in names)
        self.head = nn.Linear(6, 5)
        self.entered: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.entered = []
        for moe in self.moes:
            self.entered.append(x.detach())
            x = x + moe(x)
        return F.cross_entropy(self.head(x).mT, TARGETS, reduction="none")


def forward(model: Model, *optimizer: Any, **how: Any) -> tuple[Tensor, Any]:
    torch.manual_seed(3)
    with capture(model, *optimizer, **how) as routings:
        losses = model(X)
    return losses, routings


def updates(model: Model) -> list[int]:
    return [int(moe.router.updates) for moe in model.moes]


# --- the update ------------------------------------------------------------------------------------------------------


def test_update_comes_with_the_optimisers_next_step() -> None:
    model, surrogate = Model("priced"), Surrogate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        losses, routings = forward(model, optimizer)
        surrogate(losses, routings).backward()
        assert updates(model) == [step - 1] * 2
        optimizer.step()
        assert updates(model) == [step] * 2
    optimizer.step()  # nothing was captured since
    assert updates(model) == [3, 3]
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_every_capture_of_an_accumulated_step_is_updated_once() -> None:
    model, surrogate = Model("priced"), Surrogate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batch in range(3):
        losses, routings = forward(model, optimizer)
        (surrogate(losses, routings) / 3).backward()
        if micro_batch == 1:
            routings.update()
    assert updates(model) == [1, 1]
    optimizer.step()
    assert updates(model) == [3, 3]


def test_captures_in_evaluation_mode_are_not_kept_and_move_nothing() -> None:
    model, surrogate = Model("priced"), Surrogate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, routings = forward(model, optimizer)
    model.eval()
    for _ in range(3):
        with torch.no_grad():
            _, evaluated = forward(model, optimizer)
    (after,) = optimizer._optimizer_step_post_hooks.values()
    assert after.pending == [routings]
    evaluated.update()
    assert updates(model) == [0, 0]
    surrogate(losses, routings).backward()
    optimizer.step()  # of the batch before the evaluation, whatever the mode is now
    assert updates(model) == [1, 1]


class Wrapped(torch.optim.Optimizer):
    """An optimiser around another one that does not run its own constructor, as accelerate's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_optimiser_within_others(depth: int) -> None:
    model = Model("priced")
    inner = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(depth):
        optimizer = Wrapped(optimizer)
    losses, routings = forward(model, optimizer)
    Surrogate()(losses, routings).backward()
    optimizer.step()
    assert updates(model) == [1, 1]
    assert len(inner._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize("optimizer", [Wrapped(None), 3, "sgd"])
def test_an_optimiser_whose_steps_cannot_be_told(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # to see what users see
    model = Model()
    message = r"optimizer must be a torch.optim.Optimizer, .* pass the torch optimiser, or .* routings.update\(\)"
    with pytest.raises(ValueError, match=message), capture(model, optimizer):
        pytest.fail("the error comes before the forward pass")


def test_balance_losses_without_a_graph_are_refused() -> None:
    moe = MoE(6, 4, router="switch")
    x = torch.randn(8, 6, requires_grad=True)
    with capture(moe) as routings:
        checkpoint(moe, x, use_reentrant=True)
    message = r"layer '' must run with a graph .*: use checkpoint\(..., use_reentrant=False\), or a Surrogate"
    with pytest.raises(ValueError, match=message):
        routings.balance_loss()
    with torch.no_grad():
        value = routings.balance_loss()
    with capture(moe) as routings:
        checkpoint(moe, x, use_reentrant=False)
    torch.testing.assert_close(routings.balance_loss().detach(), value)
    assert routings.balance_loss().requires_grad


def test_an_update_without_a_surrogate_warns_once() -> None:
    model = Model("skip-iw", "switch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        losses, _ = forward(model, optimizer)
        losses.mean().backward()
        optimizer.step()

    with pytest.warns(RoutingWarning, match=r"no surrogate has used the records of 'moes.0', .*losses, routings") as w:
        step()
    assert len(w) == 1
    step()


@pytest.mark.parametrize("how", ["no_grad", "eval", "gating", "surrogate", "inner"])
def test_an_update_that_needs_no_surrogate_says_nothing(how: str) -> None:
    model = Model("skip-iw", loss="gating" if how == "gating" else "reinforce")
    model.train(how != "eval")
    with torch.set_grad_enabled(how != "no_grad"), capture(model) as outer:
        losses, routings = forward(model)
    if how in ("surrogate", "inner"):
        Surrogate()(losses, routings).backward()
    (outer if how == "inner" else routings).update()


def test_a_capture_without_a_forward_pass_asks_for_nothing() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer):
        pass
    optimizer.step()
    assert updates(model) == [0, 0]
    assert len(optimizer._optimizer_step_post_hooks) == 0


# --- inputs and readouts ---------------------------------------------------------------------------------------------


def test_inputs_are_kept_if_they_are_asked_for() -> None:
    model = Model()
    assert all(emission.inputs is None for emission in forward(model)[1].consume())
    kept = [emission.inputs for emission in forward(model, inputs=True)[1].consume()]
    for found, wanted in zip(kept, model.entered, strict=True):
        assert torch.equal(found, wanted)
        assert not found.requires_grad
    assert not any(moe.routing_inputs for moe in model.moes)
    with capture(model, inputs=True) as outer, capture(model):
        model(X)
    assert all(emission.inputs is not None for emission in outer.consume())


@pytest.mark.parametrize("masked", [False, True])
def test_readouts_are_a_readout_and_a_residual_baseline_for_each_layer(masked: bool) -> None:
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(2)) < 0.7 if masked else None
    model = Model(loss="gated-reinforce", capacity_factor=0.8)
    surrogate = Surrogate(Readouts(model, 5))
    by_hand, heads = Surrogate([ResidualBaseline(), ResidualBaseline()]), nn.ModuleList(Readout(6, 5) for _ in range(2))
    for mine, theirs in zip(heads, surrogate.baseline.readouts, strict=True):
        mine.load_state_dict(theirs.state_dict())
    for _ in range(3):  # the coefficients learn
        gradients = []
        for step in ("owned", "by hand"):
            model.zero_grad(), surrogate.zero_grad(), heads.zero_grad()
            losses, routings = forward(model, inputs=step == "owned")
            if step == "owned":
                parts = surrogate.parts(losses, routings, targets=TARGETS, mask=mask)
                parts.loss.backward()
                read = [p.grad for p in surrogate.parameters()]
            else:
                found = [head(h, TARGETS, mask=mask) for head, h in zip(heads, model.entered, strict=True)]
                loss = by_hand(losses, routings, residual=[f.residual for f in found], mask=mask)
                torch.testing.assert_close(parts.loss, loss)  # the readouts' losses are gradient and no value
                torch.testing.assert_close(parts.readout, found[0].loss.detach() + found[1].loss.detach())
                (loss + found[0].loss + found[1].loss).backward()
                read = [p.grad for p in heads.parameters()]
            gradients.append([*(p.grad for p in model.parameters()), *read])
        torch.testing.assert_close(*gradients)


def test_readouts_of_layers_that_are_gated_are_left_alone() -> None:
    model = Model("switch", "skip-iw")
    surrogate = Surrogate(Readouts(model, 5))
    losses, routings = forward(model, inputs=True)
    surrogate(losses, routings, targets=TARGETS).backward()
    first, second = surrogate.baseline.readouts
    assert first.head.weight.grad is None
    assert second.head.weight.grad is not None


def test_a_whole_loop_learns_and_its_state_goes_along() -> None:
    model = Model(loss="gated-reinforce")
    surrogate = Surrogate(Readouts(model, 5))
    groups = parameter_groups(model, 1e-2, surrogate=surrogate)
    assert [group["name"] for group in groups] == ["model", "routers", "readouts"]
    optimizer, tasks = torch.optim.AdamW(groups), []
    for _ in range(20):
        losses, routings = forward(model, optimizer, inputs=True)
        parts = surrogate.parts(losses, routings, targets=TARGETS)
        parts.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tasks.append(float(parts.task))
    assert tasks[-1] < tasks[0] - 0.1
    resumed = Surrogate(Readouts(Model(), 5))
    resumed.load_state_dict(surrogate.state_dict())
    found = [s(*forward(model, inputs=True), targets=TARGETS).detach() for s in (surrogate, resumed)]
    assert torch.equal(*found)


def test_head_of_your_own_and_inputs_of_a_flat_batch() -> None:
    model = Model()
    surrogate = Surrogate(Readouts(model, lambda dim: nn.Sequential(nn.Linear(dim, 3), nn.Tanh(), nn.Linear(3, 5))))
    losses, routings = forward(model, inputs=True)
    surrogate(losses.flatten(), routings, targets=TARGETS.flatten()).backward()
    assert all(head.grad is not None and bool(head.grad.any()) for head in surrogate.parameters())
    flat = [head.grad for head in surrogate.parameters()]
    surrogate.zero_grad()
    surrogate(*forward(model, inputs=True), targets=TARGETS).backward()
    assert all(torch.equal(*pair) for pair in zip(flat, (head.grad for head in surrogate.parameters()), strict=True))


def test_refusals() -> None:
    model = Model()
    surrogate = Surrogate(Readouts(model, 5))
    with pytest.raises(ValueError, match=r"targets must be given with Readouts, got None"):
        surrogate(*forward(model, inputs=True))
    with pytest.raises(ValueError, match=r"capture\(model, inputs=True\)"):
        surrogate(*forward(model), targets=TARGETS)
    with pytest.raises(ValueError, match=r"targets must come with Readouts, got another baseline"):
        Surrogate()(*forward(model), targets=TARGETS)
    with pytest.raises(ValueError, match=r"has 2 layers, got 1 readouts"):
        Surrogate(Readouts(model.moes[0], 5))(*forward(model, inputs=True), targets=TARGETS)
    with pytest.raises(ValueError, match=r"model must hold at least one"):
        Readouts(nn.Linear(2, 2), 5)


# --- parts and balance losses ----------------------------------------------------------------------------------------


def test_parts() -> None:
    counts = torch.rand(3, 8, generator=torch.Generator().manual_seed(2)) < 0.7
    model = Model(capacity_factor=0.7)
    for weights in ("router", "all"):
        losses, routings = forward(model)
        parts = Surrogate(0.3, weights=weights).parts(torch.where(counts, losses, torch.nan), routings, mask=counts)
        torch.testing.assert_close(parts.task, losses[counts].mean().detach())
        balance = sum(float(b.detach()) for routing in routings for b in routing.balance_losses.values())
        assert float(parts.balance) == pytest.approx(balance, rel=1e-6)
        assert parts.readout is None
        weight = routings[0].weight * routings[1].weight if weights == "all" else torch.ones(24)
        weighted = (weight * losses.detach().flatten())[counts.flatten()].sum() / counts.sum()
        torch.testing.assert_close(parts.loss.detach(), weighted + parts.balance)
        assert not parts.task.requires_grad


@pytest.mark.parametrize("router", ["switch", "topk", "priced", "base"])
def test_gated_routers_need_no_surrogate(router: str) -> None:
    model, gradients = Model(router), []
    for plain in (True, False):
        model.zero_grad()
        losses, routings = forward(model)
        loss = losses.mean() + routings.balance_loss() if plain else Surrogate()(losses, routings)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


# --- trained without a capture ---------------------------------------------------------------------------------------


def test_a_layer_that_is_trained_without_a_capture_warns_once() -> None:
    model = Model()
    with pytest.warns(RoutingWarning, match="trained without a capture") as caught:
        model(X).mean().backward()
    assert len(caught) == 2  # one a layer, with the same text: shown once
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        model(X).mean().backward()
        copy.deepcopy(model)(X).mean().backward()
    assert again == []


def test_what_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Model()(X)  # nobody differentiates
        Model("switch")(X).mean().backward()
        Model(loss="gating")(X).mean().backward()
        Model().eval()(X).mean().backward()
        losses, routings = forward(Model())
        Surrogate()(losses, routings).backward()
    assert caught == []


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_may_change_after_training() -> None:
    torch.manual_seed(0)
    moe = MoE(6, 4, router="switch", capacity_factor=None, balance_loss=0.0)
    with torch.no_grad():
        moe.router.weight[0] += 1.0
    x = torch.randn(400, 6) + 1.0
    for _ in range(17):
        with capture(moe) as routings:
            moe(x)
        routings.update()
    assert int(moe.router.average.batches) == 3  # of every eighth
    priced = MoE(6, 4, router="switch", evaluation="priced")
    priced.load_state_dict(moe.state_dict())
    moe.eval().router.evaluation = "priced"
    for layer in (moe, priced.eval()):
        assert violation(layer, x) < 0.1
    moe.router.evaluation = "argmax"
    assert violation(moe, x) > 1.0
    with pytest.raises(ValueError, match="evaluation must be one of 'argmax', 'priced', got 'best'"):
        moe.router.evaluation = "best"


def violation(moe: MoE, x: Tensor) -> float:
    with capture(moe) as routings:
        moe(x)
    return float(routings[0].stats.max_violation)


def test_base_evaluates_by_prices_unless_told_otherwise() -> None:
    assert MoE(6, 4, router="base").router.evaluation == "priced"
    assert MoE(6, 4, router="base", evaluation="argmax").router.evaluation == "argmax"
    assert MoE(6, 4, router="switch").router.evaluation == "argmax"


def test_rate_of_loss_free() -> None:
    assert MoE(6, 4, router="loss-free", rate=0.1).router.rule.rate == 0.1
    assert MoE(6, 4, router="loss-free").router.rule.rate == 1e-3
    with pytest.raises(ValueError, match=r"rate must be left at 0.001 with router 'switch'.* only loss-free"):
        MoE(6, 4, router="switch", rate=0.1)
