# SPDX-License-Identifier: Apache-2.0
"""What every router holds, by parametrisation over the table: a router that is added is tested by being there."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.nn import ROUTERS, MoE, Routing, Surrogate, capture

DIM, EXPERTS = 6, 3
# Strategies once more with two experts a row, and with what chooses itself.
VARIANTS: dict[str, dict[str, Any]] = {
    "sample, two": {"top_k": 2},
    "skip-iw, two": {"top_k": 2},
    "gm-iw, two": {"top_k": 2, "temperature": "auto"},
    "gm-iw-avg-mix, two": {"top_k": 2, "solves": 3, "eps": "auto", "temperature": "auto", "loss": "gating"},
}
pytestmark = pytest.mark.parametrize("router", [*ROUTERS, *VARIANTS])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Batches of a few rows only wait for a second thread."""
    torch.set_num_threads(1)


def layer(router: str, num_experts: int = EXPERTS, **how: Any) -> MoE:
    torch.manual_seed(1)
    name = router.partition(",")[0]
    how = {**VARIANTS.get(router, {}), **how}
    if "top_k" in ROUTERS[name].options and name not in eq.STRATEGIES:
        how.setdefault("top_k", 2)
    if num_experts == 1:
        how.pop("top_k", None)
    return MoE(DIM, num_experts, hidden_dim=8, router=name, **how)


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(moe: MoE, x: Tensor, **how: Any) -> tuple[Tensor, Routing]:
    """One forward pass from a fixed seed, with its routing."""
    how.setdefault("generator", torch.Generator().manual_seed(3))
    with capture(moe) as routings:
        y = moe(x, **how)
    (routing,) = routings
    return y, routing


def step(moe: MoE, x: Tensor, **how: Any) -> tuple[Tensor, Routing]:
    """Forward and backward of a made-up loss for each row."""
    with capture(moe) as routings:
        y = moe(x, generator=torch.Generator().manual_seed(3), **how)
    loss = Surrogate(baseline=0.3)((y - 1).square().sum(-1), routings, mask=how.get("mask"))
    loss.backward()
    return loss.detach(), routings[0]


def check_routing(routing: Routing, rows: int, num_experts: int) -> None:
    assert routing.logits.shape == routing.log_p.shape == (rows, num_experts)
    assert routing.indices.shape == routing.scores.shape
    assert routing.indices.dtype == torch.int64
    assert bool(((routing.indices >= 0) & (routing.indices <= num_experts)).all())
    absent = routing.indices == num_experts
    assert bool((routing.scores[absent] == 0).all())
    assert torch.equal(routing.kept, ~absent.all(1))
    assert not routing.weight.requires_grad
    for x in (routing.scores, routing.weight, routing.log_p, *routing.balance_losses.values()):
        assert bool(x.isfinite().all())
    if routing.capacity is not None and rows:
        assert int(routing.stats.load.max()) <= routing.capacity
    if routing.exactly_balanced:
        assert routing.stats.load.tolist() == [rows // num_experts] * num_experts
    if routing.mask is not None:
        assert not bool(routing.kept[~routing.mask].any())
        assert bool((routing.weight[~routing.mask] == 0).all())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 5)])
@pytest.mark.parametrize("training", [True, False])
def test_shapes(router: str, shape: tuple[int, ...], training: bool) -> None:
    moe = layer(router).train(training)
    x = rows(*shape)
    y, routing = run(moe, x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert bool(y.isfinite().all())
    assert routing.shape == shape
    check_routing(routing, x.numel() // DIM, EXPERTS)


def test_one_expert(router: str) -> None:
    moe = layer(router, 1)
    _, routing = step(moe, rows(5))
    check_routing(routing, 5, 1)
    assert routing.stats.load.tolist() == [5]
    y, _ = run(moe.eval(), rows(5))
    assert y.shape == (5, DIM)


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)],
)
def test_dtypes(router: str, weights: torch.dtype, inputs: torch.dtype) -> None:
    moe = layer(router, dtype=weights)
    x = rows(8, dtype=inputs).requires_grad_()
    _, routing = step(moe, x)
    wide = torch.float64 if inputs == torch.float64 else torch.float32
    for tensor in (routing.logits, routing.log_p, routing.scores, routing.weight):
        assert tensor.dtype == wide
    assert x.grad is not None
    assert x.grad.dtype == inputs
    assert run(moe.eval(), x)[0].dtype == inputs


def test_float32_routes_as_float64_does(router: str) -> None:
    moe = layer(router).eval()
    y, routing = run(moe, rows(8))
    double_y, double_routing = run(copy.deepcopy(moe).double(), rows(8).double())
    assert torch.equal(routing.indices, double_routing.indices)
    torch.testing.assert_close(y.double(), double_y, rtol=1e-4, atol=1e-5)


def test_autocast_leaves_the_router_alone(router: str) -> None:
    moe = layer(router)
    _, plain = run(moe, rows(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = run(moe, rows(8))
        half, _ = run(moe, rows(8).bfloat16())
    assert y.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert torch.equal(routing.logits, plain.logits)
    assert torch.equal(routing.indices, plain.indices)
    assert torch.equal(routing.scores, plain.scores)


def test_masked_rows_take_no_expert_and_change_nothing(router: str) -> None:
    moe = layer(router)
    mask = torch.tensor([True, False, True, True, False, True, True, True]).reshape(2, 4)
    x = rows(2, 4)
    y, routing = run(moe, x, mask=mask)
    check_routing(routing, 8, EXPERTS)
    assert bool((y[~mask] == 0).all())
    garbage = torch.where(mask.unsqueeze(-1), x, 50.0)
    assert torch.equal(run(moe, garbage, mask=mask)[0][mask], y[mask])


def test_all_masked(router: str) -> None:
    moe = layer(router)
    x = rows(4).requires_grad_()
    mask = torch.zeros(4, dtype=torch.bool)
    loss, routing = step(moe, x, mask=mask)
    check_routing(routing, 4, EXPERTS)
    assert bool(loss.isfinite())
    assert routing.stats.load.tolist() == [0] * EXPERTS
    before = copy.deepcopy(moe.router.state_dict())
    moe.observe(routing)
    for name, value in moe.router.state_dict().items():  # only the number of updates moves
        assert name == "updates" or torch.equal(value, before[name])


def test_gradients_are_finite_and_reach_what_learns(router: str) -> None:
    moe = layer(router)
    x = rows(12).requires_grad_()
    step(moe, x)
    for name, parameter in moe.named_parameters():
        if name == "router.weight" and router == "hash":
            continue
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().sum()) > 0, name
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_non_contiguous_input(router: str) -> None:
    moe = layer(router)
    x = rows(4, 3).transpose(0, 1)
    assert not x.is_contiguous()
    y, routing = run(moe, x)
    z, contiguous = run(moe, x.contiguous())
    assert torch.equal(y, z)
    assert torch.equal(routing.indices, contiguous.indices)


def test_same_seed_same_result(router: str) -> None:
    moe, x = layer(router), rows(40)
    y, routing = run(moe, x)
    state = torch.get_rng_state()
    z, again = run(moe, x)
    assert torch.equal(torch.get_rng_state(), state)  # a generator leaves the global stream alone
    assert torch.equal(y, z)
    assert torch.equal(routing.weight, again.weight)
    torch.manual_seed(5)
    first = run(moe, x, generator=None)[1]
    torch.manual_seed(5)
    second = run(moe, x, generator=None)[1]
    third = run(moe, x, generator=None)[1]
    assert torch.equal(first.indices, second.indices)
    random = router.partition(",")[0] in eq.STRATEGIES
    assert torch.equal(second.indices, third.indices) != random


def test_evaluation_needs_no_randomness(router: str) -> None:
    moe = layer(router).eval()
    state = torch.get_rng_state()
    y, routing = run(moe, rows(9), generator=None)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run(moe, rows(9), generator=None)[0], y)
    assert routing.balance_losses == {}
    assert bool((routing.weight == 1).all())
    # Row by row: nothing in evaluation depends on the rest of the batch (hash looks at the position).
    if router != "hash":
        alone = torch.cat([moe(row[None]) for row in rows(9)])
        torch.testing.assert_close(alone, y)


def test_deepcopy_and_pickle(router: str) -> None:
    moe = layer(router)
    moe.observe(run(moe, rows(16))[1])
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        for mode in (True, False):
            assert torch.equal(run(other.train(mode), rows(8))[0], run(moe.train(mode), rows(8))[0])
        with torch.no_grad():
            other.router.weight.zero_()
    assert bool((moe.router.weight != 0).any())


def test_state_dict_round_trip(router: str) -> None:
    how = {} if router == "hash" else {"evaluation": "priced"}
    moe, other = layer(router, **how), layer(router, **how)
    for seed in range(3):
        moe.observe(run(moe, rows(16, seed=seed))[1])
    buffer = io.BytesIO()
    torch.save(moe.state_dict(), buffer)
    buffer.seek(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(buffer))
    for mode in (True, False):
        y, routing = run(moe.train(mode), rows(8))
        z, loaded = run(other.train(mode), rows(8))
        assert torch.equal(y, z)
        assert torch.equal(routing.indices, loaded.indices)


def test_gradient_accumulation(router: str) -> None:
    """Two backward passes add up, and observing between them changes no gradient of the first."""
    moe = layer(router)
    halves, gradients = [rows(8, seed=1), rows(8, seed=2)], []
    for x in halves:
        fresh = copy.deepcopy(moe)
        step(fresh, x)
        gradients.append([p.grad for p in fresh.parameters()])
    for x in halves:
        step(moe, x)
    for parameter, *parts in zip(moe.parameters(), *gradients, strict=True):
        present = [part for part in parts if part is not None]
        if present:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, sum(present))
        else:
            assert parameter.grad is None


def test_half_precision_casts_keep_state_wide(router: str) -> None:
    moe = layer(router).bfloat16()
    floating = [b for b in moe.router.buffers() if b.is_floating_point()]
    assert all(b.dtype == torch.float32 for b in floating)
    assert moe.router.weight.dtype == torch.bfloat16


def test_stats_are_plain_numbers_and_the_same_keys(router: str) -> None:
    numbers = run(layer(router), rows(12))[1].stats.to_dict()
    always = {"load", "max_violation", "load_entropy", "router_entropy", "fraction_dropped", "effective_sample_size"}
    assert {*always, "largest_weight"} <= set(numbers)
    assert set(numbers) - always <= {"largest_weight", "gap", "work"}
    assert isinstance(numbers["load"], list)
    assert all(isinstance(value, (int, float)) for name, value in numbers.items() if name != "load")
