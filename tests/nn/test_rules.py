# SPDX-License-Identifier: Apache-2.0
"""Each rule against a slow, obvious twin."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.assignment import assign
from equipoise.estimators import STRATEGIES
from equipoise.nn import MoE, Router, RouteRequest, Routing, RoutingRule, SamplingRule, make_router
from equipoise.nn._bias_rules import LossFree, Priced, RunningPrices
from equipoise.nn._peer_rules import Base, Dense, Hash, SinkhornBase, TopK, hash_integers
from equipoise.nn._rules import drop_overflow

E = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small batches only wait for a second thread."""
    torch.set_num_threads(1)


def draw(rows: int = 10, experts: int = E, seed: int = 0, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


def ask(rule: RoutingRule, logits: Tensor, **how: Any) -> Routing:
    request = {
        "logits": logits,
        "log_p": logits.log_softmax(-1),
        "capacity": None,
        "mask": None,
        "token_ids": None,
        "positions": torch.arange(logits.shape[0]),
        "training": True,
        "temperature": 1.0,
        "generator": torch.Generator().manual_seed(7),
        **how,
    }
    return rule(logits, RouteRequest(**request))


def route(rule: RoutingRule, logits: Tensor, **how: Any) -> Routing:
    """Routes given logits: the gate is the identity."""
    router = Router(logits.shape[1], logits.shape[1], rule, capacity_factor=None)
    with torch.no_grad():
        router.weight.copy_(torch.eye(logits.shape[1]))
    return router(logits, **how)


def slow_drop(wanted: list[list[int]], experts: int, capacity: int, mask: list[bool]) -> list[list[int]]:
    """First choices of all rows in order, then second ones; an expert that is full takes no more."""
    left, kept = [capacity] * experts, [[experts] * len(row) for row in wanted]
    for choice in range(len(wanted[0])):
        for row, asked in enumerate(wanted):
            if mask[row] and left[asked[choice]] > 0:
                left[asked[choice]] -= 1
                kept[row][choice] = asked[choice]
    return kept


@pytest.mark.parametrize("capacity", [1, 2, 3, 10])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_top_k(top_k: int, capacity: int, masked: bool) -> None:
    logits = draw(seed=capacity)
    mask = torch.rand(10, generator=torch.Generator().manual_seed(1)) < 0.7 if masked else torch.ones(10).bool()
    choice = ask(TopK(top_k), logits, capacity=capacity, mask=mask if masked else None)
    wanted = [sorted(range(E), key=lambda j, row=row: -row[j])[:top_k] for row in logits.tolist()]
    kept = slow_drop(wanted, E, capacity, mask.tolist())
    assert choice.indices.tolist() == kept
    for row in range(10):
        p = torch.softmax(logits[row], -1).tolist()
        total = 1.0 if top_k == 1 else sum(p[j] for j in wanted[row])
        expected = [p[j] / total if j < E else 0.0 for j in kept[row]]
        assert choice.scores[row].tolist() == pytest.approx(expected, abs=1e-6)


def test_top_k_as_mixtral_computes_it() -> None:
    """Softmax over all, the K largest, renormalised: Mixtral's three lines."""
    logits = draw(50)
    weights, experts = torch.softmax(logits, -1).topk(2, dim=-1)
    choice = ask(TopK(2), logits)
    assert torch.equal(choice.indices, experts)
    torch.testing.assert_close(choice.scores, weights / weights.sum(-1, keepdim=True))


def test_one_expert_is_gated_by_its_probability() -> None:
    """Renormalised over one expert the factor is 1, and no gradient reaches the router."""
    logits = draw().requires_grad_()
    choice = ask(TopK(1), logits)
    torch.testing.assert_close(choice.scores[:, 0], logits.softmax(-1).amax(-1))
    (gradient,) = torch.autograd.grad(choice.scores.sum(), logits)
    assert float(gradient.abs().amin()) > 0


def test_drop_overflow_counts_first_choices_before_second_ones() -> None:
    wanted = torch.tensor([[0, 1], [1, 0], [1, 0]])
    assert drop_overflow(wanted, 2, 2).tolist() == [[0, 2], [1, 0], [1, 2]]


def best_by_enumeration(logits: Tensor, capacity: int) -> list[int]:
    """The best assignment of all that keep to the capacity."""
    rows, experts = logits.shape
    fitting = (
        z for z in itertools.product(range(experts), repeat=rows) if max(z.count(j) for j in range(experts)) <= capacity
    )
    return list(max(fitting, key=lambda z: sum(float(logits[i, j]) for i, j in enumerate(z))))


@pytest.mark.parametrize("capacity", [2, 3, None])
def test_base(capacity: int | None) -> None:
    logits = draw(6, seed=4).requires_grad_()
    choice = ask(Base(), logits, capacity=capacity)
    assert choice.indices[:, 0].tolist() == best_by_enumeration(logits.detach(), 6 if capacity is None else capacity)
    torch.testing.assert_close(choice.scores, logits.softmax(-1).gather(1, choice.indices))
    assert choice.exactly_balanced == (capacity == 2)
    assert choice.gap is not None
    assert abs(float(choice.gap)) < 1e-9
    assert ask(Base(), logits, capacity=None, training=False).indices[:, 0].equal(logits.argmax(-1))


def sinkhorn_by_hand(logits: Tensor) -> Tensor:
    p = logits.double().exp()
    for _ in range(2000):
        p = p / p.sum(0) * (p.shape[0] / p.shape[1])
        p = p / p.sum(1, keepdim=True)
    return p


def test_sinkhorn_base() -> None:
    logits = draw(20, seed=2)
    choice = ask(SinkhornBase(), logits, capacity=7)
    wanted = sinkhorn_by_hand(logits).argmax(-1, keepdim=True).tolist()
    assert wanted != logits.argmax(-1, keepdim=True).tolist()
    assert choice.indices.tolist() == slow_drop(wanted, E, 7, [True] * 20)
    present = choice.indices[:, 0] < E
    p = logits.softmax(-1).gather(1, choice.indices.clamp_max(E - 1))
    torch.testing.assert_close(choice.scores[present], p[present])
    assert choice.work is not None
    assert int(choice.work) >= 1
    assert ask(SinkhornBase(), logits, training=False).indices[:, 0].equal(logits.argmax(-1))


def hash_by_hand(key: int, seed: int) -> int:
    """The same on Python's unlimited integers."""
    bits = 2**62 - 1
    x = (key + seed * 0x1E3779B97F4A7C15 % bits) & bits
    for multiplier in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D):
        x = ((x ^ (x >> 31)) * multiplier) & bits
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_hash(seed: int) -> None:
    keys = torch.tensor([0, 1, 2, 3, 50_256, 2**40, -1, 2**62 - 1])
    assert hash_integers(keys, seed).tolist() == [hash_by_hand(key, seed) for key in keys.tolist()]
    choice = ask(Hash(seed), draw(8), token_ids=keys, capacity=2)
    wanted = [[hash_by_hand(key, seed) % E] for key in keys.tolist()]
    assert choice.indices.tolist() == slow_drop(wanted, E, 2, [True] * 8)
    assert choice.scores.tolist() == [[float(j < E)] for (j,) in choice.indices.tolist()]


def test_hash_spreads_ids_and_positions() -> None:
    ids = 60_000
    for seed in range(3):
        counts = torch.bincount(hash_integers(torch.arange(ids), seed) % 16, minlength=16)
        # A random function has a standard deviation of sqrt(n / k (1 - 1/k)); six of them are never seen.
        assert float((counts - ids / 16).abs().max()) < 6 * math.sqrt(ids / 16 * (15 / 16))
    assert not torch.equal(hash_integers(torch.arange(100), 0) % 16, hash_integers(torch.arange(100), 1) % 16)


def test_each_layer_may_have_its_own_hash() -> None:
    ids = torch.arange(40)
    for seed in (0, 7):
        router = make_router("hash", None, 4, seed=seed, capacity_factor=None)
        routed = router.route(torch.zeros(40, 4), token_ids=ids)
        assert routed.indices[:, 0].tolist() == [hash_by_hand(key, seed) % 4 for key in range(40)]
    with pytest.raises(ValueError, match=r"seed must be an integer from 0 to .*, got -1"):
        make_router("hash", None, 4, seed=-1)
    with pytest.raises(ValueError, match=r"seed must be left at 0 with router 'switch', .*: only hash do"):
        make_router("switch", None, 4, seed=1)


def test_hash_follows_the_position_in_the_sequence_without_ids() -> None:
    moe = MoE(4, 4, hidden_dim=4, router="hash", capacity_factor=None)
    indices = moe.router(torch.randn(3, 20, 4)).indices.reshape(3, 20)
    assert torch.equal(indices[0], indices[1])
    ids = torch.arange(60).reshape(3, 20)
    assert not torch.equal(moe.router(torch.randn(3, 20, 4), token_ids=ids).indices.reshape(3, 20)[1], indices[1])


def test_loss_free_moves_the_bias_by_hand() -> None:
    rule, bias = LossFree(E, rate=0.25, top_k=2), [0.0] * E
    for seed in range(4):
        logits = draw(11, seed=seed) + torch.tensor([1.0, 0.0, -1.0])
        routing = route(rule, logits)
        loads = [0] * E
        for row, chosen in zip(logits.tolist(), routing.indices.tolist(), strict=True):
            best = sorted(range(E), key=lambda j, row=row: -(row[j] + bias[j]))[:2]
            assert chosen == best
            for j in best:
                loads[j] += 1
        rule.observe(routing)
        mean = sum(loads) / E
        bias = [b + 0.25 * ((load < mean) - (load > mean)) for b, load in zip(bias, loads, strict=True)]
        assert rule.bias.tolist() == pytest.approx(bias)
        # The factors know nothing of the bias.
        chosen_p = logits.softmax(-1).gather(1, routing.indices)
        torch.testing.assert_close(routing.scores, chosen_p / chosen_p.sum(-1, keepdim=True))


def test_loss_free_reaches_balance() -> None:
    rule, logits = LossFree(4, rate=0.02), draw(400, 4) + torch.tensor([2.0, 0.0, 0.0, -2.0])
    first = route(rule, logits).stats.max_violation
    for _ in range(300):
        routing = route(rule, logits)
        rule.observe(routing)
    assert float(first) > 1
    assert float(routing.stats.max_violation) < 0.1


def test_running_prices_are_a_plain_mean_and_then_a_moving_one() -> None:
    average = RunningPrices(E, decay=0.75)
    seen: list[Tensor] = []
    expected = torch.zeros(E, dtype=torch.float64)
    for seed in range(7):
        logits = draw(12, seed=seed) + torch.tensor([1.0, 0.0, 0.0])
        average.take(logits)
        prices = assign(logits).prices
        seen.append(prices - prices.mean())
        expected = torch.stack(seen).mean(0) if seed < 4 else 0.75 * expected + 0.25 * seen[-1]
        torch.testing.assert_close(average.prices.double(), expected, rtol=1e-5, atol=1e-6)
    assert abs(float(average.prices.sum())) < 1e-5


def test_running_prices_follow_the_average_that_predicts_best() -> None:
    """The slow twin: every average from all batches, and its squared errors, from the definition."""
    average, rates = RunningPrices(E), [2.0**-i for i in range(6, -1, -1)]
    means, errors = torch.zeros(len(rates), E, dtype=torch.float64), torch.zeros(len(rates), dtype=torch.float64)
    chosen: list[int] = []
    for t in range(1, 41):
        # Popularity stays for 15 batches, then moves by 1 a batch: far more than sampling noise.
        logits = draw(60, seed=t) + torch.tensor([1.0, 0.0, -1.0]) * max(t - 15, 0)
        average.take(logits)
        prices = assign(logits).prices - assign(logits).prices.mean()
        if t > 1:
            errors += max(1 / (t - 1), 0.05) * ((prices - means).square().sum(-1) - errors)
        for i, rate in enumerate(rates):
            means[i] += max(rate, 1 / t) * (prices - means[i])
        chosen.append(int(errors.argmin()))
        torch.testing.assert_close(average.prices.double(), means[chosen[-1]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(average.errors.double(), errors, rtol=1e-4, atol=1e-5)
    assert chosen[0] == 0
    assert rates[chosen[14]] < 0.2  # noise is averaged out while nothing moves
    assert rates[chosen[-1]] == 1.0  # only the last batch is any good while all moves


def test_running_prices_go_on_from_a_state_with_one_average() -> None:
    older, layer = RunningPrices(E, decay=0.95), Priced(E)
    for seed in range(3):
        older.take(draw(12, seed=seed))
    state = {f"average.{name}": getattr(older, name).clone() for name in ("prices", "batches")}
    layer.load_state_dict(state)
    assert layer.average.prices.equal(older.prices)
    for average in (older, layer.average):
        average.take(draw(12, seed=9))
    torch.testing.assert_close(layer.average.prices, older.prices)  # the fourth batch enters with 1/4 in both
    again = Priced(E)
    again.load_state_dict(layer.state_dict())
    assert all(x.equal(y) for x, y in zip(again.state_dict().values(), layer.state_dict().values(), strict=True))


def test_batch_without_rows_leaves_running_prices_as_they_are() -> None:
    average = RunningPrices(E)
    for seed in range(3):
        average.take(draw(12, seed=seed))
    before = {name: x.clone() for name, x in average.state_dict().items()}
    average.take(draw(4), torch.zeros(4, dtype=torch.bool))
    assert all(x.equal(before[name]) for name, x in average.state_dict().items())


def test_running_prices_see_only_rows_that_count() -> None:
    logits, mask = draw(9), torch.tensor([True] * 6 + [False] * 3)
    masked, alone = RunningPrices(E), RunningPrices(E)
    masked.take(logits, mask)
    alone.take(logits[:6])
    torch.testing.assert_close(masked.prices, alone.prices)


@pytest.mark.parametrize("top_k", [1, 2])
def test_priced_selects_by_logits_minus_prices(top_k: int) -> None:
    rule, logits = Priced(E, top_k=top_k), draw(12)
    rule.average.prices.copy_(torch.tensor([1.0, -1.0, 0.0]))
    choice = ask(rule, logits)
    assert choice.indices.equal((logits - rule.average.prices).topk(top_k, dim=-1).indices)
    chosen_p = logits.softmax(-1).gather(1, choice.indices)
    expected = chosen_p if top_k == 1 else chosen_p / chosen_p.sum(-1, keepdim=True)
    torch.testing.assert_close(choice.scores, expected)


def test_priced_keeps_new_batches_near_balance() -> None:
    rule, tilt = Priced(8), torch.linspace(-2, 2, 8)
    for seed in range(10):
        rule.observe(route(rule, draw(512, 8, seed=seed) + tilt))
    fresh = draw(4096, 8, seed=99) + tilt
    assert float(route(TopK(), fresh).stats.max_violation) > 1
    assert float(route(rule, fresh).stats.max_violation) < 0.15


@pytest.mark.parametrize("rule", [Priced(E), LossFree(E)])
def test_prices_of_a_record_do_not_change_with_the_next_step(rule: Any) -> None:
    logits = draw(12) + torch.tensor([5.0, 0.0, 0.0])
    routing = route(rule, logits)
    rule.observe(routing)
    assert routing.prices is not None
    assert routing.prices.tolist() == [0.0] * E
    moved = route(rule, logits).prices
    assert moved is not None
    assert float(moved[0]) > 0


def test_dense_is_the_average_of_all_outputs() -> None:
    torch.manual_seed(0)
    moe = MoE(4, 3, hidden_dim=5, router="dense")
    x = torch.randn(6, 4)
    y = moe(x)
    p = torch.softmax(x @ moe.router.weight.T, -1)
    outputs = expert_outputs(moe, x)
    expected = (p.unsqueeze(-1) * outputs).sum(1)
    torch.testing.assert_close(y, expected)
    ours = torch.autograd.grad(y.square().sum(), [moe.router.weight, moe.experts.up])
    theirs = torch.autograd.grad(expected.square().sum(), [moe.router.weight, moe.experts.up])
    torch.testing.assert_close(ours, theirs)


def expert_outputs(moe: MoE, x: Tensor) -> Tensor:
    """Every expert on every row, by its own two layers: [T, E, dim]."""
    experts: Any = moe.experts
    hidden = torch.nn.functional.gelu(torch.einsum("td,ehd->teh", x, experts.up) + experts.up_bias)
    return torch.einsum("teh,edh->ted", hidden, experts.down) + experts.down_bias


@pytest.mark.parametrize("linear", [True, False])
def test_dense_has_the_gradient_of_the_expected_loss_only_where_the_loss_is_linear(linear: bool) -> None:
    """The paper's objective needs the loss under each expert: sum_j p_j f(e_j(x)), here enumerated."""
    torch.manual_seed(0)
    moe = MoE(4, 3, hidden_dim=5, router="dense", dtype=torch.float64)
    x, target = torch.randn(6, 4).double(), torch.randn(4).double()

    def loss(y: Tensor) -> Tensor:
        return (y * target).sum(-1) if linear else (y - target).square().sum(-1)

    p = torch.softmax(x @ moe.router.weight.T, -1)
    expected_loss = (p * loss(expert_outputs(moe, x))).sum(-1).mean()
    parameters = [moe.router.weight, moe.experts.down]
    exact = torch.autograd.grad(expected_loss, parameters)
    dense = torch.autograd.grad(loss(moe(x)).mean(), parameters)
    error = max(float((a - b).abs().max()) for a, b in zip(exact, dense, strict=True))
    assert (error < 1e-12) == linear
    assert linear or error > 1e-3


@pytest.mark.parametrize("loss", ["reinforce", "gating", "gated-reinforce"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_rule_is_the_strategy(name: str, loss: str) -> None:
    strategy, logits = STRATEGIES[name], draw(12, seed=3)
    mask = torch.tensor([True] * 10 + [False] * 2)
    rule = SamplingRule(strategy, loss=loss)
    choice = ask(rule, logits, capacity=4, mask=mask, temperature=1.7)
    noise = strategy.draw_noise([12, E], generator=torch.Generator().manual_seed(7), dtype=torch.float32)
    s, weight = strategy.draw(logits.log_softmax(-1), noise, temperature=1.7, capacity=4, mask=mask)
    assert choice.indices[:, 0].tolist() == [int(z) if kept else E for z, kept in zip(s.z, s.kept, strict=True)]
    assert choice.weight is not None
    assert torch.equal(choice.weight, weight)
    p = logits.softmax(-1) if loss != "reinforce" else torch.ones(12, E)
    factor = p.gather(1, s.z.clamp_max(E - 1).unsqueeze(1))
    torch.testing.assert_close(choice.scores, torch.where(s.kept.unsqueeze(1), factor, 0.0))
    assert choice.score_function == (loss != "gating")
    assert choice.sample is not None
    evaluated = ask(rule, logits, training=False)
    assert evaluated.indices[:, 0].equal(logits.argmax(-1))
    torch.testing.assert_close(evaluated.scores, p.amax(-1, keepdim=True))


def test_matching_strategies_report_prices_in_logit_units_and_their_gap() -> None:
    logits = 4 * draw(12)
    cold = ask(SamplingRule(STRATEGIES["gm"], importance=False), logits, capacity=4, temperature=0.0)
    assert cold.prices is not None
    torch.testing.assert_close(cold.prices, assign(logits.log_softmax(-1), 4).prices)
    for temperature in (0.01, torch.tensor(0.01)):  # hardly any noise: the same prices, whatever the units
        rule = SamplingRule(STRATEGIES["gm"], importance=False)  # weights would overflow at this temperature
        choice = ask(rule, logits, capacity=4, temperature=temperature)
        assert choice.prices is not None
        torch.testing.assert_close(choice.prices, cold.prices, rtol=0.0, atol=0.2)
        assert choice.gap is not None
        assert abs(float(choice.gap)) < 1e-6
    assert float(cold.prices.max()) > 1


@pytest.mark.parametrize("rule", [TopK(), Base(), SinkhornBase(), Hash(), Dense(), SamplingRule(STRATEGIES["gm-iw"])])
def test_exact_balance_is_claimed_only_where_it_is_known(rule: Any) -> None:
    balanced = isinstance(rule, Base | SamplingRule)
    assert ask(rule, draw(12), capacity=4).exactly_balanced == balanced
    for rows, capacity, mask in ((12, 5, None), (13, 5, None), (12, 4, torch.ones(12, dtype=torch.bool))):
        assert not ask(rule, draw(rows), capacity=capacity, mask=mask).exactly_balanced
