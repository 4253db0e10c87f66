# SPDX-License-Identifier: Apache-2.0
"""Every way to compute experts against the loop over experts, on values and gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn

from equipoise.nn import Grouped
from equipoise.nn import _fused as fused_module
from equipoise.nn._expert_checks import check_expert_modules, check_tokens
from equipoise.nn._expert_paths import PATHS, pick_path
from equipoise.nn._experts import MLPExperts, ModuleExperts, SwiGLUExperts, make_experts
from equipoise.nn._plain_experts import Weights, experts_by_loop

DIM, HIDDEN = 8, 16
KINDS = {
    "gelu": lambda e, **kw: MLPExperts(DIM, e, hidden_dim=HIDDEN, **kw),
    "relu": lambda e, **kw: MLPExperts(DIM, e, hidden_dim=HIDDEN, activation="relu", bias=False, **kw),
    "swiglu": lambda e, **kw: SwiGLUExperts(DIM, e, hidden_dim=HIDDEN, **kw),
    "swiglu-bias": lambda e, **kw: SwiGLUExperts(DIM, e, hidden_dim=HIDDEN, bias=True, **kw),
}
# Rows of each expert, and how many belong to nobody.
RAGGED = {
    "some empty": ([3, 0, 5, 1], 2),
    "one has all": ([0, 9, 0], 0),
    "all dropped": ([0, 0], 4),
    "one expert": ([6], 1),
    "no rows": ([0, 0, 0], 0),
}


def ragged(counts: list[int], tail: int, dtype: torch.dtype = torch.float64, dim: int = DIM) -> Grouped:
    rows = torch.randn(sum(counts) + tail, dim, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return Grouped(rows=rows, counts=torch.tensor(counts), slots=None)


def even(num_experts: int, slots: int, dtype: torch.dtype = torch.float64) -> Grouped:
    rows = torch.randn(num_experts * slots, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return Grouped(rows=rows, counts=torch.full([num_experts], slots), slots=slots)


def value_and_gradients(experts: nn.Module, groups: Grouped, compute: str) -> list[Tensor]:
    experts = copy.deepcopy(experts)
    experts.compute = compute
    rows = groups.rows.clone().requires_grad_()
    output = experts(Grouped(rows=rows, counts=groups.counts, slots=groups.slots))
    # Unequal weights; rows of nobody have one too, and must not reach anything.
    weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output, *torch.autograd.grad(output, [rows, *experts.parameters()], weight)]


def assert_agree(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("chunk", [2, 1024])
def test_fused_agrees_with_the_loop_on_ragged_groups(
    kind: str, case: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_module, "_CHUNK", chunk)
    counts, tail = RAGGED[case]
    experts = KINDS[kind](len(counts), dtype=torch.float64)
    groups = ragged(counts, tail)
    assert_agree(value_and_gradients(experts, groups, "fused"), value_and_gradients(experts, groups, "loop"))


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_groups_are_cut_into_even_pieces_near_the_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No short piece is left over: it would cost a pass over the weights as a long one does."""
    monkeypatch.setattr(fused_module, "_CHUNK", chunk)
    sizes = list(range(41))
    pieces, longest = fused_module._cut(torch.tensor(sizes), -1)
    rows = [row for ranges in pieces for start, end in ranges for row in range(start, end)]
    assert rows == list(range(sum(sizes)))
    lengths = [[end - start for start, end in ranges] for ranges in pieces]
    assert [sum(group) for group in lengths] == sizes
    assert longest == max(length for group in lengths for length in group) <= 3 * chunk / 2
    for size, group in zip(sizes, lengths, strict=True):
        assert not group or max(group) - min(group) <= 1
        assert not group or min(group) >= min(size, 3 * chunk // 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["some empty", "one has all", "one expert"])
def test_grouped_agrees_with_the_loop(kind: str, case: str) -> None:
    counts, tail = RAGGED[case]
    experts = KINDS[kind](len(counts))
    groups = ragged(counts, tail, torch.float32)
    assert_agree(
        value_and_gradients(experts, groups, "grouped"),
        value_and_gradients(experts, groups, "loop"),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["fused", "bmm"])
@pytest.mark.parametrize(("num_experts", "slots"), [(3, 4), (1, 5), (4, 0)])
def test_even_groups_agree_with_the_loop(kind: str, compute: str, num_experts: int, slots: int) -> None:
    experts = KINDS[kind](num_experts, dtype=torch.float64)
    groups = even(num_experts, slots)
    assert_agree(value_and_gradients(experts, groups, compute), value_and_gradients(experts, groups, "loop"))


def test_loop_is_what_linear_layers_compute() -> None:
    experts = MLPExperts(DIM, 2, hidden_dim=HIDDEN, dtype=torch.float64, compute="loop")
    groups = ragged([2, 3], 1)
    assert experts.up_bias is not None
    assert experts.down_bias is not None
    expected = []
    for e, rows in enumerate(groups.rows[:5].split([2, 3])):
        first, second = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((DIM, HIDDEN), (HIDDEN, DIM)))
        first.load_state_dict({"weight": experts.up[e], "bias": experts.up_bias[e]})
        second.load_state_dict({"weight": experts.down[e], "bias": experts.down_bias[e]})
        expected.append(second(nn.functional.gelu(first(rows))))
    torch.testing.assert_close(experts(groups), torch.cat([*expected, torch.zeros(1, DIM, dtype=torch.float64)]))


def test_gated_expert_is_silu_of_the_first_half_times_the_second() -> None:
    experts = SwiGLUExperts(2, 1, hidden_dim=3, dtype=torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64)
    gate, up = x @ experts.up[0, :3].T, x @ experts.up[0, 3:].T
    expected = (gate * gate.sigmoid() * up) @ experts.down[0].T
    torch.testing.assert_close(experts(Grouped(rows=x, counts=torch.tensor([4]), slots=None)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_passes_gradcheck(kind: str) -> None:
    experts = KINDS[kind](3, dtype=torch.float64, compute="fused")
    rows = torch.randn(6, DIM, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([2, 0, 3])

    def call(rows: Tensor, *parameters: Tensor) -> Tensor:
        values = dict(zip(dict(experts.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(experts, values, (Grouped(rows=rows, counts=counts, slots=None),))

    assert torch.autograd.gradcheck(call, (rows, *experts.parameters()), fast_mode=True)


def test_frozen_parameters_and_constant_rows_are_left_out() -> None:
    experts = MLPExperts(DIM, 2, hidden_dim=HIDDEN, dtype=torch.float64, compute="fused")
    full = value_and_gradients(experts, ragged([2, 3], 1), "fused")
    names = ["rows", *dict(experts.named_parameters())]
    for wanted in names[1:]:
        for name, parameter in experts.named_parameters():
            parameter.requires_grad_(name == wanted)
        output = experts(ragged([2, 3], 1))
        weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
        (gradient,) = torch.autograd.grad(output, experts.get_parameter(wanted), weight)
        torch.testing.assert_close(gradient, full[1 + names.index(wanted)])
    experts.requires_grad_(False)
    assert not experts(ragged([2, 3], 1)).requires_grad


def test_no_gradient_wanted_gives_the_same_output() -> None:
    experts = SwiGLUExperts(DIM, 3, hidden_dim=HIDDEN, compute="fused")
    groups = ragged([4, 0, 2], 1, torch.float32)
    with torch.no_grad():
        quiet = experts(groups)
    assert torch.equal(quiet, experts(groups).detach())


def test_expanded_gradient_is_taken() -> None:
    for compute in ("fused", "grouped"):
        experts = MLPExperts(DIM, 2, hidden_dim=HIDDEN, compute=compute)
        experts(ragged([2, 3], 0, torch.float32)).sum().backward()
        assert experts.down_bias is not None
        assert experts.down_bias.grad is not None
        torch.testing.assert_close(experts.down_bias.grad, torch.tensor([[2.0], [3.0]]).expand(2, DIM))


@pytest.mark.parametrize("compute", ["auto", "fused", "loop"])
def test_autocast_computes_in_bfloat16(compute: str) -> None:
    experts = MLPExperts(DIM, 2, hidden_dim=HIDDEN, compute=compute)
    groups = ragged([3, 2], 1, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = experts(groups)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), experts(groups), atol=0.03, rtol=0.03)
    output.float().square().sum().backward()
    assert experts.up.grad is not None
    assert experts.up.grad.dtype == torch.float32


def test_path_depends_on_layout_device_dtype_and_size() -> None:
    def weights(dtype: torch.dtype, dim: int, device: str) -> Weights:
        return Weights(
            up=torch.empty(2, dim, dim, dtype=dtype, device=device),
            up_bias=None,
            down=torch.empty(2, dim, dim, dtype=dtype, device=device),
            down_bias=None,
            activation="gelu",
        )

    def path(device: str, slots: int | None, dtype: torch.dtype = torch.float32, dim: int = 512) -> str:
        rows = torch.empty(8, dim, dtype=dtype, device=device)
        groups = Grouped(rows=rows, counts=torch.empty(2, dtype=torch.int64, device=device), slots=slots)
        return pick_path(groups, weights(dtype, dim, device))

    assert path("cpu", None) == "fused"
    assert path("cpu", 512) == "fused"
    assert path("cpu", 4) == "bmm"
    # The meta device stands for an accelerator: nothing but its name is looked at.
    assert path("meta", 4) == "bmm"
    assert path("meta", None) == "fused"
    assert path("meta", None, torch.bfloat16) == "grouped"
    assert path("meta", None, torch.bfloat16, dim=12) == "fused"
    assert set(PATHS) == {"fused", "bmm", "grouped", "loop"}


# --- modules of the user's --------------------------------------------------------------------------------------------


def test_modules_take_their_rows_and_an_idle_one_is_not_called() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("called without rows")

    experts = ModuleExperts([nn.Linear(DIM, DIM), Refuses(), nn.Identity()])
    groups = ragged([2, 0, 3], 1, torch.float32)
    output = experts(groups)
    torch.testing.assert_close(output[:2], experts.experts[0](groups.rows[:2]))
    assert torch.equal(output[2:5], groups.rows[2:5])
    assert torch.equal(output[5:], torch.zeros(1, DIM))


def test_one_module_is_copied_and_drawn_anew() -> None:
    torch.manual_seed(0)
    experts = make_experts(nn.Sequential(nn.Linear(DIM, 3), nn.ReLU(), nn.Linear(3, DIM)), DIM, 3)
    assert isinstance(experts, ModuleExperts)
    first, second, third = (expert.state_dict()["0.weight"] for expert in experts.experts)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_make_experts_takes_names_lists_and_experts_that_are_ready() -> None:
    assert isinstance(make_experts("mlp", DIM, 2), MLPExperts)
    assert isinstance(make_experts("swiglu", DIM, 2, 5), SwiGLUExperts)
    assert make_experts("mlp", DIM, 2).hidden_dim == 4 * DIM
    assert isinstance(make_experts(nn.ModuleList([nn.Identity(), nn.Identity()]), DIM, 2), ModuleExperts)
    ready = MLPExperts(DIM, 2)
    assert make_experts(ready, DIM, 2) is ready


def test_loop_helper_skips_only_on_request() -> None:
    groups = ragged([0, 2], 0)
    called: list[int] = []

    def expert(e: int, rows: Tensor) -> Tensor:
        called.append(e)
        return rows

    experts_by_loop(groups, expert)
    experts_by_loop(groups, expert, skip_empty=True)
    assert called == [0, 1, 1]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLPExperts(0, 2), "dim must be an integer >= 1, got 0"),
        (lambda: MLPExperts(4, 2, hidden_dim=-1), "hidden_dim must be an integer >= 1, got -1"),
        (lambda: SwiGLUExperts(4, 0), "num_experts must be an integer >= 1, got 0"),
        (lambda: MLPExperts(4, 2, activation="tanh"), "activation must be one of 'gelu', 'relu', got 'tanh'"),
        (lambda: MLPExperts(4, 2, compute="fast"), "compute must be one of 'auto', 'fused', .*got 'fast'"),
        (lambda: make_experts("cnn", 4, 2), "experts must be one of 'mlp', 'swiglu', got 'cnn'"),
        (lambda: make_experts([nn.Identity()], 4, 2), "experts must number num_experts = 2, got 1"),
        (lambda: make_experts(MLPExperts(4, 3), 4, 2), "experts must number num_experts = 2, got 3"),
        (lambda: ModuleExperts([]), "experts must hold at least one module"),
        (lambda: ModuleExperts([nn.Identity()] * 2), "experts must be 2 modules of their own, got one of them twice"),
    ],
)
def test_bad_experts_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"experts\[1\] must be a torch.nn.Module, got function"):
        check_expert_modules([nn.Identity(), lambda x: x])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (ragged([2, 1], 0, torch.float32, dim=5), r"rows must have shape \[rows, 8\], one row a token, got \[3, 5\]"),
        (ragged([2, 1], 0, torch.float64), "rows must have the dtype of the experts' parameters, torch.float32, got"),
        (ragged([2, 1, 4], 0, torch.float32), "counts must have one entry for each of the 2 experts, got 3"),
        (
            Grouped(rows=torch.zeros(5, DIM), counts=torch.tensor([2, 2]), slots=2),
            r"rows must number experts \* slots = 2 \* 2, got 5",
        ),
    ],
)
def test_wrong_groups_are_refused(groups: Grouped, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLPExperts(DIM, 2, hidden_dim=HIDDEN)(groups)


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="x must be floating point, got torch.int64: convert it with x.float"):
        check_tokens("x", torch.zeros(2, 2, dtype=torch.int64), 2, 2)


def test_batched_products_refuse_ragged_groups() -> None:
    with pytest.raises(ValueError, match="compute='bmm' must have even groups, got ragged ones"):
        MLPExperts(DIM, 2, hidden_dim=HIDDEN, compute="bmm")(ragged([2, 1], 0, torch.float32))


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        (nn.Linear(DIM, 3), r"experts\[0\] must map \[m, dim\] to the same shape, got \[4, 3\] for \[4, 8\]"),
        (nn.LSTM(DIM, DIM), r"experts\[0\] must return a tensor, got tuple"),
    ],
)
def test_expert_that_changes_the_shape_is_refused(expert: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModuleExperts([expert])(ragged([4], 0, torch.float32))
