# SPDX-License-Identifier: Apache-2.0
"""Off the CPU: the same results, nothing on the CPU by accident, and a list of what makes the host wait."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import equipoise as eq
from equipoise.assignment import detour_costs
from support.families import draw_scores

TESTS = Path(__file__).parents[1]
PARTS = [
    "assignment",
    "traffic_is_counted_honestly",
    "conditional_values",
    "samplers",
    "balancing",
    "estimators",
    "layers",
    "several_experts",
]
# Every place where the host waits for the device, over all routers and estimators. Three read what they must have:
# contested rows, how often Sinkhorn's method has to go on, how many rows each expert has. The others check input.
PLACES = {
    "_core/_value_checks.py:all_finite": "logits and losses are finite",
    "_core/_value_checks.py:checked_slots": "every expert keeps a row",
    "assignment/_conditional.py:_check_optimal": "the gap proves the assignment",
    "assignment/_exchange.py:read": "contested rows, and how many there are",
    "assignment/_range.py:_read_results": "nothing overflowed in float64, a warm start did not hide the scores",
    "balancing/_feasible.py:require_capacity": "capacities hold the rows",
    "balancing/_feasible.py:require_rows": "every row may take an expert",
    "balancing/_newton.py:advance": "Newton's step lowers the dual value",
    "balancing/_operator.py:balance": "problems that did not converge",
    "balancing/_problem.py:evaluate": "which problems go on",
    "balancing/_problem.py:prepare": "forbidden pairs",
    "balancing/_solve.py:_iterate": "whether all problems have converged",
    "balancing/_solve.py:_rounding": "how exact sums can be",
    "balancing/_solve.py:_solve_group": "which problems are alike",
    "estimators/_log_p_checks.py:check_log_p": "rows of log_p sum to 1",
    "estimators/_log_p_checks.py:checked_log_ratio": "importance weights are finite",
    "nn/_fused.py:_cut": "how many rows each expert has, where capacity does not say it",
}


def test_same_results_and_listed_waits(fresh_python: Callable[..., str]) -> None:
    script = (TESTS / "device" / "accelerated.py").read_text()
    *parts, places = fresh_python(script, PYTHONPATH=str(TESTS)).splitlines()
    assert parts == PARTS
    assert places.split()[1:] == sorted(PLACES)


def test_operators_stay_on_the_device_when_traced() -> None:
    """What a graph for CUDA is traced with; needs no such device."""
    with FakeTensorMode(), torch.no_grad():
        scores = torch.empty(2, 64, 4, device="cuda")
        a = torch.ops.equipoise.assign(scores, None, None, None, "settle", 2)
        assert [list(x.shape) for x in a] == [[2, 64, 2], [2, 4], [2, 4], [2, 64], [2], [2, 4], [2]]
        one = eq.Assignment(scores.new_empty(2, 64, dtype=torch.int64), *a[1:])
        found = [*a, eq.conditional_values(scores, one), detour_costs(scores, one)]
        assert {x.device.type for x in found} == {"cuda"}


def test_fake_cuda_scores_pick_the_method_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    operator = torch.ops.equipoise.assign.default

    def spy(*args: object) -> object:
        asked.append(str(args[4]))
        return operator(*args)

    monkeypatch.setattr("equipoise.assignment._assign._OPERATOR", spy)
    with FakeTensorMode(), torch.no_grad():
        eq.assign(torch.empty(64, 4, device="cuda"), top_k=2)
    eq.assign(torch.zeros(64, 4))
    assert asked == ["settle", "primal-dual"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("top_k", [None, 2])
def test_on_a_real_device(top_k: int | None) -> None:
    scores = draw_scores("gumbel", 16384, 64, seed=0)
    expected = eq.assign(scores, top_k=top_k)
    found = eq.assign(scores.cuda(), top_k=top_k)
    assert found.z.device.type == "cuda"
    assert float(found.value) == pytest.approx(float(expected.value), rel=1e-12)
    assert float(found.gap) <= 1e-12 * float(expected.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("router", eq.nn.ROUTERS)
def test_layers_on_a_real_device(router: str) -> None:
    moe = eq.nn.MoE(16, 4, router=router, device="cuda")
    with eq.nn.capture(moe) as routings:
        out = moe(torch.randn(64, 16, device="cuda"))
    eq.nn.Surrogate().cuda()(out.square().mean(-1), routings).backward()
    assert {x.grad.device.type for x in moe.parameters() if x.grad is not None} == {"cuda"}
