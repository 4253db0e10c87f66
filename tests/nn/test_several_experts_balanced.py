# SPDX-License-Identifier: Apache-2.0
"""Several experts a row, balanced: exact prices for their number, quantile balancing, and even groups."""

import pytest
import torch

import equipoise as eq
from equipoise.nn._bias_rules import Quantile, RunningPrices

T, E = 512, 8


def draw_logits(seed: int, rows: int = T) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, E, generator=generator) + 2.0 * torch.randn(E, generator=torch.Generator().manual_seed(99))


def max_violation(logits: torch.Tensor, top_k: int) -> float:
    load = torch.bincount(logits.topk(top_k, -1).indices.flatten(), minlength=E).double()
    return float(load.max() / load.mean() - 1)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_expert_bias_balances_its_batch(top_k: int) -> None:
    logits = draw_logits(1)
    bias = eq.nn.expert_bias(logits, top_k)
    assert abs(float(bias.mean())) < 1e-6
    assert max_violation(logits, top_k) > 0.3
    # A row that is tied at the prices, of which there are less than E, may count at the wrong expert.
    assert max_violation(logits + bias, top_k) <= E / (top_k * T / E)


def test_prices_of_one_expert_a_row_do_not_balance_several() -> None:
    logits = draw_logits(2)
    assert max_violation(logits + eq.nn.expert_bias(logits, 1), 2) > 0.1


def test_expert_bias_takes_batches_and_masks() -> None:
    logits, mask = torch.stack([draw_logits(3), draw_logits(4)]), torch.rand(2, T) < 0.8
    both = eq.nn.expert_bias(logits, 2, mask=mask)
    left = logits[1][mask[1]]
    # Several prices may be optimal; the dual value is the same for all of them.
    torch.testing.assert_close(dual_value(left, both[1]), dual_value(left, eq.nn.expert_bias(left, 2)))


def dual_value(logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    prices = bias.max() - bias
    return (logits - prices).topk(2, -1).values.sum() + -(-2 * len(logits) // E) * prices.sum()


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_running_prices_are_those_of_several_experts(top_k: int) -> None:
    average, logits = RunningPrices(E), draw_logits(5)
    average.take(logits, top_k=top_k)
    torch.testing.assert_close(average.prices, -eq.nn.expert_bias(logits, top_k))


@pytest.mark.parametrize("router", ["priced", "quantile"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_prices_of_past_batches_balance_the_next(router: str, top_k: int) -> None:
    layer = eq.nn.MoE(8, E, hidden_dim=8, router=router, top_k=top_k)
    with torch.no_grad():
        layer.router.weight.normal_(generator=torch.Generator().manual_seed(6))
    generator = torch.Generator().manual_seed(7)
    violation = []
    for _ in range(20):
        with eq.nn.capture(layer) as routings:
            layer(torch.randn(2048, 8, generator=generator) + 0.5)
        violation.append(float(routings[0].stats.max_violation))
        routings.update()
    assert violation[0] > 0.3
    # Of 2,048 rows an expert's share varies by 6%, and the largest of 8 by about twice that.
    assert sum(violation[-5:]) / 5 < 0.2


@pytest.mark.parametrize("top_k", [1, 3])
def test_quantile_balancing_approaches_the_exact_prices(top_k: int) -> None:
    logits, rule = draw_logits(8), Quantile(E, top_k=top_k, steps=200)
    router = eq.nn.Router(E, E, rule)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    rule.observe(router(logits))
    assert max_violation(logits - rule.prices, top_k) < 0.1
    torch.testing.assert_close(rule.prices, -eq.nn.expert_bias(logits, top_k), atol=0.1, rtol=0.0)


def test_quantile_leaves_a_batch_without_rows_alone() -> None:
    rule = Quantile(E)
    router = eq.nn.Router(E, E, rule)
    rule.observe(router(draw_logits(1)[:4], mask=torch.zeros(4, dtype=torch.bool)))
    assert rule.prices.tolist() == [0.0] * E


@pytest.mark.parametrize(("router", "top_k"), [("base", 1), ("base", 2), ("gm-iw", 2), ("gm-iw", 3)])
def test_exactly_balanced_groups_are_even_for_several_experts(router: str, top_k: int) -> None:
    layer = eq.nn.MoE(8, E, hidden_dim=8, router=router, top_k=top_k, capacity_factor=1.0)
    x = torch.randn(64, 8)
    with eq.nn.capture(layer) as routings:
        y = layer(x)
    routing = routings[0]
    assert routing.exactly_balanced
    assert routing.stats.load.tolist() == [top_k * 64 // E] * E
    groups, _ = layer.dispatcher.dispatch(x, routing)
    assert groups.slots == top_k * 64 // E
    scores, indices = routing.scores.unsqueeze(-1), routing.indices
    every = torch.stack([layer.experts(eq.nn.LocalDispatcher().dispatch(x, routing)[0])])
    assert every.shape[1] == top_k * 64
    expected = torch.zeros_like(y)
    for j in range(E):
        row, slot = (indices == j).nonzero(as_tuple=True)
        out = torch.nn.functional.gelu(x[row] @ layer.experts.up[j].T + layer.experts.up_bias[j])
        out = out @ layer.experts.down[j].T + layer.experts.down_bias[j]
        expected = expected.index_add(0, row, scores[row, slot] * out)
    torch.testing.assert_close(y, expected)


def test_base_takes_the_best_balanced_choice() -> None:
    layer = eq.nn.MoE(8, E, router="base", top_k=2, capacity_factor=1.0)
    with eq.nn.capture(layer) as routings:
        layer(torch.randn(64, 8))
    routing = routings[0]
    a = eq.assign(routing.logits.detach(), top_k=2)
    assert torch.equal(routing.indices, a.z)
    torch.testing.assert_close(routing.scores.sum(-1), torch.ones(64))
    layer.eval()
    with eq.nn.capture(layer) as routings:
        layer(torch.randn(64, 8))
    assert routings[0].indices.shape == (64, 2)
