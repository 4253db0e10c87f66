# SPDX-License-Identifier: Apache-2.0
"""The record of a routing decision, and its telemetry against plain Python."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.estimators import STRATEGIES
from equipoise.nn import ROUTERS, MoE, Router, RouteRequest, Routing
from equipoise.nn._peer_rules import TopK
from equipoise.nn._stats import routing_stats


def record(**how: Any) -> Routing:
    """A record of four rows and three experts, two choices a row, made up."""
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
    fields = {
        "logits": logits,
        "log_p": logits.log_softmax(-1),
        "indices": torch.tensor([[0, 1], [2, 3], [3, 3], [1, 0]]),
        "scores": torch.tensor([[0.7, 0.3], [0.5, 0.0], [0.0, 0.0], [0.9, 0.1]]),
        "weight": torch.tensor([1.0, 2.0, 0.0, 3.0]),
        "sample": None,
        "prices": None,
        "gap": None,
        "work": None,
        "capacity": None,
        "mask": None,
        "shape": (4,),
        "score_function": False,
        "exactly_balanced": False,
        "balance_losses": {},
        **how,
    }
    return Routing(**fields)


def entropy(weights: list[float]) -> float:
    total = sum(weights)
    return -sum(w / total * math.log(w / total) for w in weights if w > 0)


def test_unpacks_as_the_triple_of_hugging_face() -> None:
    routing = record()
    logits, scores, indices = routing
    assert logits is routing.logits
    assert scores is routing.scores
    assert indices is routing.indices


def test_routing_map() -> None:
    routing = record(scores=torch.tensor([[0.7, 0.3], [0.5, 0.0], [0.0, 0.0], [0.9, 0.0]], requires_grad=True))
    probs, routing_map = routing.to_routing_map()
    torch.testing.assert_close(
        probs.detach(), torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.9, 0.0]])
    )
    # A factor of 0 is still an expert that runs.
    assert routing_map.tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0]]
    (gradient,) = torch.autograd.grad(probs.sum(), routing.scores)
    assert gradient.tolist() == [[1, 1], [1, 0], [0, 0], [1, 1]]


def test_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().indices = torch.zeros(4, 2)  # pyright: ignore[reportAttributeAccessIssue]


def test_sizes() -> None:
    assert record().num_experts == 3
    assert record().num_points == 4
    mask = torch.tensor([True, False, True, True])
    assert int(record(mask=mask).num_points) == 3


def test_stats_by_hand() -> None:
    stats = record().stats.to_dict()
    assert stats["load"] == [2, 2, 1]
    assert stats["max_violation"] == pytest.approx(2 / (5 / 3) - 1)
    assert stats["load_entropy"] == pytest.approx(entropy([2, 2, 1]) / math.log(3))
    rows = [[math.exp(a) for a in row] for row in record().logits.tolist()]
    assert stats["router_entropy"] == pytest.approx(sum(map(entropy, rows)) / 4)
    assert stats["fraction_dropped"] == pytest.approx(3 / 8)
    assert stats["effective_sample_size"] == pytest.approx(36 / (4 * 14))
    assert stats["largest_weight"] == 3
    assert "gap" not in stats


def test_stats_leave_masked_rows_out() -> None:
    mask = torch.tensor([True, True, False, True])
    stats = record(mask=mask).stats.to_dict()
    rows = [[math.exp(a) for a in row] for row in record().logits[mask].tolist()]
    assert stats["router_entropy"] == pytest.approx(sum(map(entropy, rows)) / 3)
    assert stats["fraction_dropped"] == pytest.approx(1 / 6)
    assert stats["effective_sample_size"] == pytest.approx(36 / (3 * 14))


def test_stats_with_forbidden_experts_are_finite() -> None:
    log_p = torch.tensor([[0.0, -torch.inf, -torch.inf]] * 4)
    assert record(log_p=log_p).stats.to_dict()["router_entropy"] == 0.0


def test_stats_of_an_empty_batch_count_as_balanced() -> None:
    empty: dict[str, Tensor] = {
        "logits": torch.zeros(0, 3),
        "log_p": torch.zeros(0, 3),
        "indices": torch.zeros(0, 2, dtype=torch.int64),
        "scores": torch.zeros(0, 2),
        "weight": torch.zeros(0),
    }
    stats = record(**empty, shape=(0,)).stats.to_dict()
    assert stats == {
        "load": [0, 0, 0],
        "max_violation": 0.0,
        "load_entropy": 1.0,
        "router_entropy": 0.0,
        "fraction_dropped": 0.0,
        "effective_sample_size": 1.0,
        "largest_weight": 0.0,
    }


def test_stats_are_not_computed_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Routing] = []
    monkeypatch.setattr("equipoise.nn._routing.routing_stats", lambda r: calls.append(r) or routing_stats(r))
    routing = Router(4, 3, TopK())(torch.randn(5, 4))
    assert calls == []
    assert routing.stats is routing.stats
    assert len(calls) == 1


def test_stats_carry_no_gradient() -> None:
    moe = MoE(4, 3, hidden_dim=4)
    stats = moe.router(torch.randn(5, 4)).stats
    assert not any(isinstance(x, Tensor) and x.requires_grad for x in vars(stats).values())


def test_router_completes_what_a_rule_leaves_out() -> None:
    def first_expert(logits: Tensor, request: RouteRequest) -> Routing:
        rows = logits.shape[0]
        return request.route(torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1))

    mask = torch.tensor([[True, False], [True, True]])
    routing = Router(4, 3, first_expert)(torch.randn(2, 2, 4), mask=mask)
    assert routing.indices[:, 0].tolist() == [0, 3, 0, 0]
    assert routing.scores[:, 0].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert routing.weight.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert routing.kept.tolist() == [True, False, True, True]
    assert routing.capacity is None
    assert routing.shape == (2, 2)


def test_table_describes_every_router() -> None:
    strategies = list(STRATEGIES)
    peers = ["switch", "topk", "base", "s-base", "hash", "dense", "loss-free", "quantile", "priced"]
    assert list(ROUTERS) == strategies + peers
    assert all(row.doc for row in ROUTERS.values())
