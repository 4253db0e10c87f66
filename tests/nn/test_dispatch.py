# SPDX-License-Identifier: Apache-2.0
"""Dispatch, experts, combine: against a loop over tokens, in every layout."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.nn import LocalDispatcher, Routing
from equipoise.nn._experts import MLPExperts

E, DIM = 3, 4
CASES = {
    "one each": [[0], [2], [1], [0], [2], [1]],
    "dropped": [[0], [3], [0], [3], [2], [0]],
    "all dropped": [[3], [3]],
    "one expert has all": [[1], [1], [1]],
    "two each": [[0, 2], [1, 0], [2, 1], [0, 1]],
    "two each, some dropped": [[0, 3], [3, 3], [2, 0], [3, 2], [0, 1]],
    "dense": [[0, 1, 2], [2, 0, 1]],
}
EVEN = "one each"


def make_routing(
    indices: Tensor, scores: Tensor, *, capacity: int | None = None, exactly_balanced: bool = False, e: int = E
) -> Routing:
    rows = indices.shape[0]
    logits = scores.new_zeros(rows, e)
    return Routing(
        logits=logits,
        log_p=logits,
        indices=indices,
        scores=scores,
        weight=scores.new_ones(rows),
        sample=None,
        prices=None,
        gap=None,
        work=None,
        capacity=capacity,
        mask=None,
        shape=(rows,),
        score_function=False,
        exactly_balanced=exactly_balanced,
        balance_losses={},
    )


def problem(case: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = torch.tensor(CASES[case])
    x = torch.randn(z.shape[0], DIM, dtype=torch.float64, generator=generator)
    scores = torch.where(z < E, torch.rand(z.shape, dtype=torch.float64, generator=generator), 0.0)
    return x, scores, z


def by_tokens(experts: MLPExperts, x: Tensor, scores: Tensor, z: Tensor) -> Tensor:
    """One token and one expert at a time."""
    assert experts.up_bias is not None
    assert experts.down_bias is not None
    y = [0 * row for row in x]
    for t, choices in enumerate(z.tolist()):
        for i, e in enumerate(choices):
            if e < E:
                hidden = torch.nn.functional.gelu(experts.up[e] @ x[t] + experts.up_bias[e])
                y[t] = y[t] + scores[t, i] * (experts.down[e] @ hidden + experts.down_bias[e])
    return torch.stack(y)


def layer(dispatcher: LocalDispatcher, experts: nn.Module, x: Tensor, routing: Routing) -> Tensor:
    groups, metadata = dispatcher.dispatch(x, routing)
    return dispatcher.combine(experts(groups), metadata)


@pytest.mark.parametrize("compute", ["auto", "fused", "loop"])
@pytest.mark.parametrize(
    ("case", "layout"), [(EVEN, "balanced"), *((case, layout) for case in CASES for layout in ("ragged", "padded"))]
)
def test_layer_agrees_with_a_loop_over_tokens(case: str, layout: str, compute: str) -> None:
    experts = MLPExperts(DIM, E, hidden_dim=6, dtype=torch.float64, compute=compute)
    x, scores, z = problem(case)
    results = []
    for how in ("fast", "obvious"):
        leaves = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        if how == "fast":
            routing = make_routing(z, leaves[1], exactly_balanced=layout == "balanced")
            y = layer(LocalDispatcher("auto" if layout == "balanced" else layout), experts, leaves[0], routing)
        else:
            y = by_tokens(experts, *leaves, z)
        weight = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
        gradients = torch.autograd.grad(y, [*leaves, *experts.parameters()], weight, materialize_grads=True)
        gradients = [*gradients[:1], torch.where(z < E, gradients[1], 0.0), *gradients[2:]]
        results.append([y, *gradients])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_capacity_sets_the_slots_of_padded_groups_only(layout: str) -> None:
    x, scores, z = problem("dropped")
    groups, _ = LocalDispatcher(layout).dispatch(x, make_routing(z, scores, capacity=4))
    assert groups.counts.tolist() == [3, 0, 1]
    if layout == "ragged":
        assert groups.slots is None
        assert groups.rows.shape == (6, DIM)
        assert torch.equal(groups.rows[:4], x[[0, 2, 5, 4]])
    else:
        assert groups.slots == 4
        expected = torch.zeros(3, 4, DIM, dtype=torch.float64)
        expected[0, :3], expected[2, 0] = x[[0, 2, 5]], x[4]
        assert torch.equal(groups.rows, expected.reshape(12, DIM))


def test_round_trip_returns_what_is_kept_and_zero_for_the_rest() -> None:
    for layout in ("ragged", "padded"):
        x, _, z = problem("dropped")
        routing = make_routing(z, torch.where(z < E, 1.0, 0.0).double(), capacity=3)
        groups, metadata = LocalDispatcher(layout).dispatch(x, routing)
        y = LocalDispatcher(layout).combine(groups.rows, metadata)
        assert torch.equal(y, torch.where(z < E, x, 0.0))


def test_what_belongs_to_nobody_reaches_nobody() -> None:
    """Not even where it is not finite: rows of dropped tokens, outputs and gradients of empty rows."""
    for layout in ("ragged", "padded"):
        x, scores, z = problem("dropped")
        x = torch.where(z < E, x, torch.nan).requires_grad_()
        groups, metadata = LocalDispatcher(layout).dispatch(x, make_routing(z, scores, capacity=4))
        mine = torch.zeros(groups.rows.shape[0], 1, dtype=torch.bool)
        mine[metadata.row_of[z < E]] = True
        y = LocalDispatcher(layout).combine(torch.where(mine, groups.rows, torch.nan), metadata)
        assert bool(y.isfinite().all())
        (gradient,) = torch.autograd.grad(groups.rows, x, torch.where(mine, 1.0, torch.nan).expand_as(groups.rows))
        assert torch.equal(gradient, torch.where(z < E, 1.0, 0.0).double().expand_as(x))


def test_gathers_pass_gradcheck_twice() -> None:
    x, scores, z = problem("two each, some dropped")
    for layout in ("ragged", "padded"):

        def round_trip(x: Tensor, scores: Tensor, layout: str = layout) -> Tensor:
            groups, metadata = LocalDispatcher(layout).dispatch(x, make_routing(z, scores))
            return LocalDispatcher(layout).combine(groups.rows.square(), metadata)

        leaves = (x.clone().requires_grad_(), scores.clone().requires_grad_())
        assert torch.autograd.gradcheck(round_trip, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(round_trip, leaves, fast_mode=True)


@pytest.mark.parametrize("layout", ["ragged", "padded", "balanced"])
def test_no_tokens(layout: str) -> None:
    experts = MLPExperts(DIM, E, hidden_dim=6)
    x = torch.zeros(0, DIM, requires_grad=True)
    routing = make_routing(
        torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1), exactly_balanced=layout == "balanced", capacity=1
    )
    y = layer(LocalDispatcher("auto" if layout == "balanced" else layout), experts, x, routing)
    y.sum().backward()
    assert y.shape == (0, DIM)
    assert experts.up.grad is not None
    assert not experts.up.grad.any()


@pytest.mark.parametrize("exactly_balanced", [False, True])
def test_scores_multiply_in_float32_and_the_result_has_the_dtype_of_x(exactly_balanced: bool) -> None:
    z = torch.tensor([[0, 1], [1, 0]])[:, : 1 if exactly_balanced else 2]
    scores = torch.tensor([[1 / 3, 2 / 3], [0.1, 0.9]])[:, : z.shape[1]]
    x = torch.randn(2, DIM).bfloat16()
    groups, metadata = LocalDispatcher().dispatch(x, make_routing(z, scores, e=2, exactly_balanced=exactly_balanced))
    y = LocalDispatcher().combine(groups.rows, metadata)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (x.float() * scores.sum(1, keepdim=True)).bfloat16())


def test_auto_layout_is_even_only_where_nothing_is_padded() -> None:
    x, scores, z = problem(EVEN)
    balanced, _ = LocalDispatcher().dispatch(x, make_routing(z, scores, exactly_balanced=True, capacity=2))
    limited, _ = LocalDispatcher().dispatch(x, make_routing(z, scores, capacity=2))
    assert (balanced.slots, balanced.rows.shape[0]) == (2, 6)
    assert limited.slots is None


def test_metadata_cannot_be_changed() -> None:
    x, scores, z = problem("dropped")
    groups, metadata = LocalDispatcher().dispatch(x, make_routing(z, scores))
    for record in (groups, metadata):
        with pytest.raises(AttributeError):
            record.rows = x  # pyright: ignore[reportAttributeAccessIssue]


def test_ragged_memory_does_not_depend_on_the_experts() -> None:
    """No table of tokens by experts by capacity: the groups have as many rows as there are choices."""
    z = torch.zeros(16, 1, dtype=torch.int64)
    groups, metadata = LocalDispatcher().dispatch(
        torch.zeros(16, DIM), make_routing(z, torch.ones(16, 1), capacity=16, e=1000)
    )
    assert groups.rows.shape == (16, DIM)
    tensors = [value for value in vars(metadata).values() if isinstance(value, Tensor)]
    assert max(tensor.numel() for tensor in tensors) == 16


def test_layer_without_capacity_uses_the_dispatcher_it_is_given() -> None:
    torch.manual_seed(0)
    x = torch.randn(10, DIM)
    outputs = []
    for layout in ("ragged", "padded"):
        torch.manual_seed(1)
        moe = eq.nn.MoE(DIM, E, router="topk", top_k=2, dispatcher=LocalDispatcher(layout))
        outputs.append(moe(x))
    torch.testing.assert_close(*outputs)


def test_dispatch_experts_and_combine_compile_to_one_graph() -> None:
    script = Path(__file__).with_name("compiled_experts.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


# --- bad input --------------------------------------------------------------------------------------------------------


def test_broken_promises_are_refused() -> None:
    x, scores, z = problem("dropped")
    with pytest.raises(ValueError, match="expert 0 has 3 rows where its capacity promises at most 2"):
        LocalDispatcher("padded").dispatch(x, make_routing(z, scores, capacity=2))
    with pytest.raises(ValueError, match="expert 0 has 3 rows where exactly_balanced promises 2"):
        LocalDispatcher().dispatch(x, make_routing(z, scores, exactly_balanced=True))


def test_wrong_shapes_are_refused() -> None:
    x, scores, z = problem("dropped")
    routing = make_routing(z, scores)
    with pytest.raises(ValueError, match=r"x must have shape \[6, dim\], one row a token, got \[5, 4\]"):
        LocalDispatcher().dispatch(x[:5], routing)
    _, metadata = LocalDispatcher().dispatch(x, routing)
    with pytest.raises(ValueError, match=r"outputs must have shape \[6, 4\], one row a token, got \[6, 3\]"):
        LocalDispatcher().combine(x[:, :3], metadata)
    with pytest.raises(ValueError, match="layout must be one of 'auto', 'ragged', 'padded', got 'sparse'"):
        LocalDispatcher("sparse")
