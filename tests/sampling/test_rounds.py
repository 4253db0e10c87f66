# SPDX-License-Identifier: Apache-2.0
"""Several experts a row: Plackett-Luce, capacity that adds up, and products of weights that are exactly unbiased."""

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import config
from torch import Tensor

from equipoise import reference
from equipoise.estimators import STRATEGIES, Noise
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample, sample_rounds

EXACT = 1e-12
BIASED = 1e-3
# Noise that decides a row's expert whatever the logits of these tests, without costing digits.
DECISIVE = 60.0
BALANCED = [name for name, strategy in STRATEGIES.items() if strategy.respects_capacity]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small problems only wait for a second thread."""
    torch.set_num_threads(1)


def router(*shape: int, spread: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


class Drawn(NamedTuple):
    """What `sample_rounds` returns, round by round."""

    s: Sample
    weight: Tensor

    @property
    def z(self) -> Tensor:
        return self.s.z_rounds

    @property
    def kept(self) -> Tensor:
        return self.s.kept_rounds

    def log_prob(self, log_p: Tensor) -> Tensor:
        return self.s.log_prob(log_p)


def draw(name: str, log_p: Tensor, rounds: int, *, seed: int = 1, **how: Any) -> Drawn:
    generator, strategy = torch.Generator().manual_seed(seed), STRATEGIES[name]
    noises = [strategy.draw_noise(log_p.shape, generator=generator, dtype=log_p.dtype) for _ in range(rounds)]
    return Drawn(*sample_rounds(log_p, strategy, noises, **how))


def used(rounds: Drawn, k: int) -> Tensor:
    """Rows that each expert processes after each round, [..., k] for each."""
    taken = torch.nn.functional.one_hot(rounds.z, k + 1)[..., :k] * rounds.kept.unsqueeze(-1)
    return taken.sum(-3).cumsum(-2)


# --- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("n", "k", "rounds"), [(6, 3, 2), (7, 4, 4), (5, 5, 3), (1, 2, 2)])
def test_a_row_draws_different_experts(name: str, n: int, k: int, rounds: int) -> None:
    found = draw(name, router(8, n, k, spread=3.0), rounds, temperature=2.0)
    assert found.z.shape == found.kept.shape == (8, n, rounds)
    assert bool((found.z.sort(-1).values.diff(dim=-1) > 0).all())
    assert bool((found.weight >= 0).all())
    assert bool(found.weight.isfinite().all())


@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize(("n", "k", "capacity"), [(6, 3, 2), (8, 4, 2), (4, 4, 1), (7, 3, 3), (9, 2, 7), (2, 5, 1)])
def test_equal_capacities_hold_every_round(name: str, spread: float, n: int, k: int, capacity: int) -> None:
    """Up to all k rounds, however strongly rows agree: nothing infeasible, and no more than r c rows after round r."""
    log_p = router(5, n, k, spread=spread)
    log_p[1] = log_p[1, :1]  # all rows want the same
    found = draw(name, log_p, k, capacity=capacity, importance=False)
    limit = capacity * torch.arange(1, k + 1)[:, None]
    assert bool((used(found, k) <= limit).all())
    if name.startswith("gm"):
        assert bool(found.kept.all())


@pytest.mark.parametrize("name", ["gm-iw", "gm-iw-mix", "gm-iw-avg"])
def test_every_expert_that_is_left_can_be_drawn(name: str) -> None:
    """Else the weights could not make up for it: q > 0 wherever p is, with no slot to spare."""
    found = draw(name, router(20, 6, 3), 3, capacity=2)
    taken = torch.zeros(20, 6, 3, dtype=torch.bool)
    for s in found.s.rounds:
        assert torch.equal(s.log_q > -torch.inf, ~taken)
        taken |= torch.nn.functional.one_hot(s.z, 3).bool()


def test_what_a_round_leaves_free_the_next_may_fill() -> None:
    """Two rows of four fit into round 1; then three slots of expert 1 are left, and all rows that want it get it."""
    log_p = torch.tensor([[0.9, 0.09, 0.01]]).log().double().expand(4, 3)
    gumbel = torch.zeros(4, 3).double()
    noise = Noise(gumbel, torch.tensor([0.1, 0.2, 0.3, 0.4]).double())
    found = Drawn(*sample_rounds(log_p, STRATEGIES["skip-iw"], [noise, noise], capacity=2))
    assert found.z.tolist() == [[0, 1]] * 4
    assert found.kept[:, 0].tolist() == [True, True, False, False]
    assert found.kept[:, 1].tolist() == [True] * 4  # capacity 2 a round, none used before
    assert found.weight.tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0])


def test_one_round_is_the_strategy_itself() -> None:
    log_p = router(3, 6, 3)
    for name, strategy in STRATEGIES.items():
        noise = strategy.draw_noise(log_p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        s, weight = strategy.draw(log_p, noise, temperature=0.7, capacity=3)
        found = draw(name, log_p, 1, temperature=0.7, capacity=3)
        assert torch.equal(found.s.rounds[0].z, s.z)
        assert torch.equal(found.weight, weight)


def test_masked_rows_take_no_part() -> None:
    mask = torch.tensor([True, True, False, True, False, True])
    log_p = router(6, 3)
    for name in STRATEGIES:
        found = draw(name, log_p, 2, mask=mask)
        assert bool((found.z[~mask] == 3).all())
        assert not bool(found.kept[~mask].any())
        assert bool((found.weight[~mask] == 0).all())
        assert bool((found.log_prob(log_p)[~mask] == 0).all())
        garbage = torch.where(mask[:, None], log_p, -7.0)
        assert torch.equal(draw(name, garbage, 2, mask=mask).z[mask], found.z[mask])


def test_sinkhorn_first_concerns_the_first_round() -> None:
    """All rows want expert 0, so that nobody is left to take it in round 2; balancing that would be impossible."""
    log_p = torch.tensor([[0.98, 0.01, 0.01]]).log().double().expand(4, 3)
    found = draw("sample", log_p, 2, sinkhorn_first=True)
    first, second = found.s.rounds
    torch.testing.assert_close(first.log_q.exp(), torch.full([4, 3], 1 / 3).double())
    left = log_p.masked_fill(torch.nn.functional.one_hot(first.z, 3).bool(), -torch.inf).log_softmax(-1)
    torch.testing.assert_close(second.log_q, left)


# --- log p of what was drawn -----------------------------------------------------------------------------------------


def plackett_luce(p: list[float], z: tuple[int, ...]) -> float:
    chance, left = 1.0, 1.0
    for j in z:
        chance, left = chance * p[j] / left, left - p[j]
    return chance


def test_log_prob_is_that_of_plackett_luce() -> None:
    log_p = router(1, 4)
    total = 0.0
    for z in permutations(range(4), 3):
        noises = [Noise(DECISIVE * torch.nn.functional.one_hot(torch.tensor([j]), 4).double()) for j in z]
        found = Drawn(*sample_rounds(log_p, STRATEGIES["sample"], noises))
        assert found.z.tolist() == [list(z)]
        chance = float(found.log_prob(log_p).exp())
        assert chance == pytest.approx(plackett_luce(log_p.exp()[0].tolist(), z), rel=1e-12)
        assert found.weight.tolist() == pytest.approx([1.0])
        total += chance
    assert total == pytest.approx(1.0)


def test_log_prob_next_to_a_probability_of_nearly_one() -> None:
    """1 - p is 0 in float32; what is left is still known."""
    logits = torch.tensor([[40.0, 1.0, 0.0]], requires_grad=True)
    noises = [Noise(torch.tensor([row])) for row in ([9.0, 0.0, 0.0], [0.0, 0.0, 9.0])]
    found = Drawn(*sample_rounds(logits.log_softmax(-1), STRATEGIES["sample"], noises))
    assert found.z.tolist() == [[0, 2]]
    value = found.log_prob(logits.log_softmax(-1))
    value.sum().backward()
    assert float(value.detach()) == pytest.approx(-float(torch.tensor(1.0).exp().log1p()), rel=1e-5)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, -0.7310586, 0.7310586]]))


def test_gradient_of_log_prob() -> None:
    log_p = router(3, 4)
    found = draw("sample", log_p, 3)
    assert torch.autograd.gradcheck(
        lambda x: found.log_prob(x.log_softmax(-1)), (router(3, 4, seed=5).requires_grad_(),)
    )


# --- exactly unbiased ------------------------------------------------------------------------------------------------


class Task:
    """A router and a number for each row and expert; the loss is not linear in what the experts say."""

    def __init__(self, n: int, k: int, loss: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.logits, self.theta = (
            torch.randn(n, k, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)
        )
        self.loss = loss

    def losses(self, z: Tensor) -> Tensor:
        """f(z_i^1, ..., z_i^K) for every row of every problem, z [..., n, K]."""
        theta, p = (x.expand(*z.shape[:-1], -1).gather(-1, z) for x in (self.theta, self.logits.softmax(-1)))
        return ((theta.mean(-1) if self.loss == "reinforce" else (p * theta).sum(-1)) - 0.3).square()

    def terms(self, found: Drawn) -> Tensor:
        """Each row's term of the estimate."""
        losses, weight = self.losses(found.z), found.weight
        if self.loss == "gating":
            return weight * losses
        log_prob = found.log_prob(self.logits.log_softmax(-1).expand(*found.z.shape[:-1], -1))
        return weight * (losses + (losses.detach() - 0.7) * (log_prob - log_prob.detach()))

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.stack(torch.autograd.grad(objective, [self.logits, self.theta]))

    def exact(self, rounds: int) -> Tensor:
        """Of the mean loss under Plackett-Luce; with gating, the mean of the gradient."""
        (n, k), objective = self.logits.shape, torch.zeros(()).double()
        for z in permutations(range(k), rounds):
            left, chance = torch.ones(n).double(), torch.ones(n).double()
            for j in z:
                p = self.logits.softmax(-1)[:, j]
                chance, left = chance * p / left, left - p
            if self.loss == "gating":
                chance = chance.detach()
            objective = objective + (chance * self.losses(torch.tensor(z).expand(n, rounds))).mean()
        return self.gradient(objective)

    def error(self, mean: Tensor, rounds: int) -> float:
        return float((mean - self.exact(rounds)).abs().max())


LOSSES = pytest.mark.parametrize("loss", ["reinforce", "gating"])


@pytest.fixture
def _unchecked() -> Iterator[None]:
    """Thousands of rows; signatures are checked in the other tests."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def every_draw(
    task: Task, name: str, rounds: int, *, capacity: int, temperature: float, eps: float = 0.0
) -> tuple[Drawn, Tensor]:
    """Plays every z of every round and every order of the priorities, with the chance of each, worked out here."""
    n, k = task.logits.shape
    one_row = torch.tensor(list(permutations(range(k), rounds)))
    z = torch.stack([one_row[list(which)] for which in product(range(len(one_row)), repeat=n)])  # [problem, n, K]
    orders = torch.tensor(list(product(permutations(range(n)), repeat=rounds))).double() / n  # [order, K, n]
    log_p, taken, chance = task.logits.detach().log_softmax(-1), torch.zeros(len(z), n, k).bool(), 1.0 / len(orders)
    noises: list[Noise] = []
    for r in range(rounds):
        chosen = torch.nn.functional.one_hot(z[..., r], k)
        left = log_p.expand(len(z), n, k).masked_fill(taken, -torch.inf)
        q = (1 - eps) * (left / temperature).softmax(-1) + eps / (k - r) * (~taken).double()
        chance = chance * (q * chosen).sum(-1).prod(-1)
        taken = taken | chosen.bool()
        gumbel = (DECISIVE * chosen.double()).repeat_interleave(len(orders), 0)
        noises.append(Noise(gumbel, orders[:, r].repeat(len(z), 1), torch.ones(gumbel.shape[:-1]).double()))
    how = {"eps": eps} if eps else {}
    found = Drawn(
        *sample_rounds(
            log_p.expand(len(z) * len(orders), n, k),
            STRATEGIES[name],
            noises,
            capacity=capacity,
            temperature=temperature,
            **how,
        )
    )
    assert torch.equal(found.z, z.repeat_interleave(len(orders), 0))
    return found, torch.as_tensor(chance).repeat_interleave(len(orders))


@pytest.mark.usefixtures("_unchecked")
@LOSSES
@pytest.mark.parametrize(
    ("name", "n", "k", "rounds", "how"),
    [
        ("skip-iw", 3, 3, 2, {"capacity": 1, "temperature": 1.0}),
        ("skip-iw", 3, 3, 2, {"capacity": 1, "temperature": 0.6}),
        ("skip-iw", 2, 3, 3, {"capacity": 1, "temperature": 2.0}),
        ("sample", 2, 4, 3, {"capacity": 1, "temperature": 0.6}),
        ("skip-iw-mix", 3, 3, 2, {"capacity": 1, "temperature": 0.6, "eps": 0.3}),
    ],
)
def test_skipping_is_exactly_unbiased(name: str, n: int, k: int, rounds: int, how: dict[str, Any], loss: str) -> None:
    task = Task(n, k, loss)
    found, chance = every_draw(task, name, rounds, **how)
    assert float(chance.sum()) == pytest.approx(1.0)
    assert name == "sample" or not bool(found.kept.all())
    mean = task.gradient((chance * task.terms(found).mean(-1)).sum())
    assert task.error(mean, rounds) < EXACT


@pytest.mark.usefixtures("_unchecked")
def test_other_weights_are_biased() -> None:
    task, how = Task(3, 3, "reinforce"), {"capacity": 1, "temperature": 0.6}
    found, chance = every_draw(task, "skip-iw", 2, **how)
    first = (task.logits.detach().log_softmax(-1) - found.s.rounds[0].log_q).exp()
    weight = found.s.rounds[0].at_z(first) * found.s.rounds[0].keep_weight * found.s.rounds[0].kept
    mean = task.gradient((chance * task.terms(found._replace(weight=weight)).mean(-1)).sum())
    assert task.error(mean, 2) > BIASED  # the first round's weight alone
    found, chance = every_draw(task, "skip", 2, **how)
    assert task.error(task.gradient((chance * task.terms(found).mean(-1)).sum()), 2) > BIASED


def own_choices(
    log_p: Tensor, others: list[Tensor], row: int, capacity: int, temperature: float
) -> Iterator[tuple[float, Drawn]]:
    """Every way that row i's noise can turn out in all rounds, given that of the others, with its chance."""
    n, k = log_p.shape
    for z in permutations(range(k), len(others)):
        noises = [noise.clone() for noise in others]
        for noise, j in zip(noises, z, strict=True):
            noise[row] = DECISIVE * torch.eye(k).double()[j]
        found = Drawn(
            *sample_rounds(
                log_p, STRATEGIES["gm-iw"], [Noise(g) for g in noises], capacity=capacity, temperature=temperature
            )
        )
        assert found.z[row].tolist() == list(z)
        chance, left, room = 1.0, log_p, torch.full([k], capacity)
        for r, noise in enumerate(others):
            q = reference.gumbel_matching_conditional(left, noise, row, temperature=temperature, capacity=room)
            chance *= float(q[z[r]])
            taken = torch.nn.functional.one_hot(found.z[:, : r + 1], k)
            left = log_p.masked_fill(taken.sum(1).bool(), -torch.inf).log_softmax(-1)
            room = (r + 2) * capacity - taken.sum((0, 1))
        yield chance, found


@pytest.mark.usefixtures("_unchecked")
@LOSSES
@pytest.mark.parametrize(
    ("n", "k", "rounds", "capacity", "temperature"), [(3, 3, 2, 1, 1.0), (4, 3, 2, 2, 0.6), (3, 3, 3, 1, 2.0)]
)
def test_gumbel_matching_is_exactly_unbiased_for_every_draw_of_the_other_rows(
    n: int, k: int, rounds: int, capacity: int, temperature: float, loss: str
) -> None:
    task, generator = Task(n, k, loss), torch.Generator().manual_seed(4)
    others = [draw_gumbel([n, k], generator=generator, dtype=torch.float64) for _ in range(rounds)]
    mean = torch.zeros(())
    for row in range(n):
        total = 0.0
        for chance, found in own_choices(task.logits.detach().log_softmax(-1), others, row, capacity, temperature):
            mean = mean + chance * task.gradient(task.terms(found)[row] / n)
            total += chance
        assert total == pytest.approx(1.0, abs=EXACT)
    assert task.error(mean, rounds) < EXACT


@pytest.mark.parametrize("name", [*(name for name, strategy in STRATEGIES.items() if strategy.unbiased), "gm"])
def test_weighted_frequencies(name: str) -> None:
    """E[w 1(z^1, z^2)] is Plackett-Luce's; false-alarm rate 1e-8 for each of 24 z-scores, and `gm` must fail."""
    log_p = router(4, 3)
    found = draw(name, log_p.expand(4000, 4, 3), 2, capacity=2, temperature=1.5)
    worst = 0.0
    for z in permutations(range(3), 2):
        hits = found.weight * (found.z == torch.tensor(z)).all(-1)
        wanted = torch.tensor([plackett_luce(p, z) for p in log_p.exp().tolist()])
        scores = (hits.mean(0) - wanted) / (hits.std(0) / 4000**0.5)
        worst = max(worst, float(scores.abs().max()))
    assert (worst < 5.8) == STRATEGIES[name].unbiased


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 4])
def test_number_of_rounds(rounds: int) -> None:
    with pytest.raises(ValueError, match=f"noises must hold the noise of 1 to 3 rounds .*, got {rounds}"):
        draw("sample", router(2, 3), rounds)


@pytest.mark.usefixtures("_unchecked")
def test_too_few_experts_left() -> None:
    log_p = torch.tensor([[0.0, -torch.inf, -torch.inf]]).double()
    with pytest.raises(ValueError, match="logits must be free of NaN .* and leave every row an expert"):
        draw("sample", log_p, 2)
