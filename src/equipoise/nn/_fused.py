# SPDX-License-Identifier: Apache-2.0
r"""Two-layer experts as one operator: expert after expert, with buffers that stay in the cache.

For the rows x of expert e, with activation s,

.. math::
    y = s(x A_e^\top + a_e) B_e^\top + b_e.

On a CPU the products are only part of the time: fresh memory for every intermediate [m, hidden] costs as much as the
activation itself. Here one expert's rows are taken through both layers before the next expert's, in buffers of about
1,024 rows that are used again; what outlives the forward pass is the input of the activation, once, and the activation
is computed again on the way back. At 8,192 rows, dim 512, hidden 2,048 and 16 experts, forward and backward together
take 0.9 of the time of two batched products.

An operator, because the sizes of the groups are values: `torch.compile` does not look inside, so they stop no trace. On
an accelerator ragged groups make the host wait for the counts; even groups do not.

Legend: m rows in groups, E experts, D = dim, H = hidden, U = H, or 2 H for gated experts.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.nn._grouped import Grouped
from equipoise.nn._plain_experts import Weights, plain_experts

_aten = torch.ops.aten
# Rows that go through both layers at once, more or less: 8 MB of float32 at hidden 2,048. Every piece costs a pass over
# the weights and their gradients, so much smaller ones slow the products down.
_CHUNK = 1024


class Activation(NamedTuple):
    """The middle of an expert, written into buffers.

    Attributes:
        width: columns that go in for each that comes out.
        apply: `(pre [m, U], act [m, H])` writes the activation.
        prepare: `(pre, act, grad_pre [m, U])` writes the activation, and may leave in `grad_pre` what `finish` can use.
        finish: `(grad_act [m, H], pre, grad_pre)` writes the gradient of `pre`; may overwrite `grad_act`.
    """

    width: int
    apply: Callable[[Tensor, Tensor], Any]
    prepare: Callable[[Tensor, Tensor, Tensor], Any]
    finish: Callable[[Tensor, Tensor, Tensor], Any]


def _gated(pre: Tensor, act: Tensor) -> None:
    gate, up = pre.chunk(2, -1)
    _aten.silu.out(gate, out=act)
    act.mul_(up)


def _prepare_gated(pre: Tensor, act: Tensor, grad_pre: Tensor) -> None:
    gate, up = pre.chunk(2, -1)
    activated = grad_pre.chunk(2, -1)[1]  # silu(gate) is the factor of grad_act in the gradient of up
    _aten.silu.out(gate, out=activated)
    torch.mul(activated, up, out=act)


def _finish_gated(grad_act: Tensor, pre: Tensor, grad_pre: Tensor) -> None:
    (gate, up), (grad_gate, grad_up) = pre.chunk(2, -1), grad_pre.chunk(2, -1)
    grad_up.mul_(grad_act)
    grad_act.mul_(up)
    _aten.silu_backward.grad_input(grad_act, gate, grad_input=grad_gate)


def _gelu(pre: Tensor, act: Tensor, _: Tensor | None = None) -> None:
    _aten.gelu.out(pre, out=act)


def _finish_gelu(grad_act: Tensor, pre: Tensor, grad_pre: Tensor) -> None:
    _aten.gelu_backward.grad_input(grad_act, pre, grad_input=grad_pre)


def _relu(pre: Tensor, act: Tensor, _: Tensor | None = None) -> None:
    torch.clamp(pre, min=0, out=act)


def _finish_relu(grad_act: Tensor, pre: Tensor, grad_pre: Tensor) -> None:
    _aten.threshold_backward.grad_input(grad_act, pre, 0, grad_input=grad_pre)


ACTIVATIONS = {
    "gelu": Activation(width=1, apply=_gelu, prepare=_gelu, finish=_finish_gelu),
    "relu": Activation(width=1, apply=_relu, prepare=_relu, finish=_finish_relu),
    "swiglu": Activation(width=2, apply=_gated, prepare=_prepare_gated, finish=_finish_gated),
}


def fused_experts(
    rows: Tensor,
    counts: Tensor,
    slots: int | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Applies each expert to its group of rows. Differentiable; from the second derivative on, in plain torch.

    Args:
        rows: grouped by expert, [m, D].
        counts: rows of each expert, int64 [E].
        slots: rows reserved for each expert; None for ragged groups. See `Grouped`.
        up: [E, U, D].
        up_bias: [E, U] or None.
        down: [E, D, H].
        down_bias: [E, D] or None.
        activation: a key of `ACTIVATIONS`.

    Returns:
        [m, D]; zero for rows behind the last group.
    """
    given = [x for x in (rows, up, up_bias, down, down_bias) if x is not None]
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    # The products of the kernel are out= variants, which autocast leaves alone; the operator sees one dtype.
    return _forward(rows, counts, -1 if slots is None else slots, up, up_bias, down, down_bias, activation, keep)[0]


@torch.library.custom_op("equipoise::experts", mutates_args=())
def _forward(
    rows: Tensor,
    counts: Tensor,
    slots: int,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs, and the inputs of the activation [m, U] if they are to be kept (else nothing, [0, U])."""
    kind, width = ACTIVATIONS[activation], up.shape[1]
    pieces, chunk = _cut(counts, slots)
    pre = rows.new_empty([rows.shape[0] if keep else 0, width])
    scratch, act = rows.new_empty([0 if keep else chunk, width]), rows.new_empty([chunk, down.shape[2]])
    out = rows.new_empty([rows.shape[0], down.shape[1]])
    ups, up_biases, downs, down_biases = (_unstack(x, up.shape[0]) for x in (up, up_bias, down, down_bias))
    end = 0
    for e, ranges in enumerate(pieces):
        for start, end in ranges:
            p, a = pre[start:end] if keep else scratch[: end - start], act[: end - start]
            _linear(rows[start:end], ups[e], up_biases[e], p)
            kind.apply(p, a)
            _linear(a, downs[e], down_biases[e], out[start:end])
    out[end:].zero_()
    return out, pre


@_forward.register_fake
def _(
    rows: Tensor,
    counts: Tensor,  # pyright: ignore[reportUnusedParameter]
    slots: int,  # pyright: ignore[reportUnusedParameter]
    up: Tensor,
    up_bias: Tensor | None,  # pyright: ignore[reportUnusedParameter]
    down: Tensor,
    down_bias: Tensor | None,  # pyright: ignore[reportUnusedParameter]
    activation: str,  # pyright: ignore[reportUnusedParameter]
    keep: bool,
) -> tuple[Tensor, Tensor]:
    out = rows.new_empty([rows.shape[0], down.shape[1]])
    return out, rows.new_empty([rows.shape[0] if keep else 0, up.shape[1]])


@torch.library.custom_op("equipoise::experts_backward", mutates_args=())
def _backward(
    grad: Tensor,
    rows: Tensor,
    pre: Tensor,
    counts: Tensor,
    slots: int,
    up: Tensor,
    down: Tensor,
    activation: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of rows, up, up_bias, down, down_bias; empty ones where they are not wanted."""
    kind, (pieces, chunk) = ACTIVATIONS[activation], _cut(counts, slots)
    grads = _new_gradients(rows, up, down, wanted)
    grad_rows, grad_up, grad_up_bias, grad_down, grad_down_bias = grads
    act, grad_act = (rows.new_empty([chunk, down.shape[2]]) for _ in range(2))
    # Without a gate nothing is left in grad_pre before the activation has been used up.
    pre_buffer = act if kind.width == 1 else rows.new_empty([chunk, up.shape[1]])
    end = 0
    for e, ranges in enumerate(pieces):
        first = True
        for start, end in ranges:
            g, x, p = grad[start:end], rows[start:end], pre[start:end]
            a, ga, gp = (buffer[: end - start] for buffer in (act, grad_act, pre_buffer))
            kind.prepare(p, a, gp)
            if wanted[3]:
                _add_product(g.t(), a, grad_down[e], first)
            if wanted[4]:
                _add_sum(g, grad_down_bias[e], first)
            if any(wanted[:3]):
                torch.mm(g, down[e], out=ga)
                kind.finish(ga, p, gp)
            if wanted[1]:
                _add_product(gp.t(), x, grad_up[e], first)
            if wanted[2]:
                _add_sum(gp, grad_up_bias[e], first)
            if wanted[0]:
                torch.mm(gp, up[e], out=grad_rows[start:end])
            first = False
        if first:  # no rows: the gradient is zero, not absent
            for tensor in grads[1:]:
                tensor[e : e + 1].zero_()
    grad_rows[end:].zero_()
    return grad_rows, grad_up, grad_up_bias, grad_down, grad_down_bias


@_backward.register_fake
def _(
    grad: Tensor,  # pyright: ignore[reportUnusedParameter]
    rows: Tensor,
    pre: Tensor,  # pyright: ignore[reportUnusedParameter]
    counts: Tensor,  # pyright: ignore[reportUnusedParameter]
    slots: int,  # pyright: ignore[reportUnusedParameter]
    up: Tensor,
    down: Tensor,
    activation: str,  # pyright: ignore[reportUnusedParameter]
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _new_gradients(rows, up, down, wanted)


def _new_gradients(
    rows: Tensor, up: Tensor, down: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = (rows.shape, up.shape, up.shape[:2], down.shape, down.shape[:2])
    new = [rows.new_empty(shape if yes else [0]) for shape, yes in zip(shapes, wanted, strict=True)]
    return new[0], new[1], new[2], new[3], new[4]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, counts, slots, up, up_bias, down, down_bias, activation, _ = inputs
    ctx.save_for_backward(rows, output[1], counts, up, up_bias, down, down_bias)
    ctx.slots, ctx.activation = slots, activation
    ctx.set_materialize_grads(False)  # `pre` has no gradient, and zeros in its place would double the memory


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    rows, pre, counts, up, up_bias, down, down_bias = ctx.saved_tensors
    places = (0, 3, 4, 5, 6)  # of rows, up, up_bias, down, down_bias among the inputs
    wanted = [bool(ctx.needs_input_grad[place]) for place in places]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        groups = Grouped(rows=rows, counts=counts, slots=None if ctx.slots < 0 else ctx.slots)
        weights = Weights(up=up, up_bias=up_bias, down=down, down_bias=down_bias, activation=ctx.activation)
        found = _plain_gradients(grad, groups, weights, wanted)
    else:
        found = _backward(grad.contiguous(), rows, pre, counts, ctx.slots, up, down, ctx.activation, wanted)
    grads: list[Tensor | None] = [None] * 9
    for place, yes, tensor in zip(places, wanted, found, strict=True):
        grads[place] = tensor if yes else None
    return tuple(grads)


def _plain_gradients(grad: Tensor, groups: Grouped, weights: Weights, wanted: list[bool]) -> list[Tensor | None]:
    """Computes the gradients of rows, up, up_bias, down, down_bias so that they can be differentiated again."""
    given = [groups.rows, weights.up, weights.up_bias, weights.down, weights.down_bias]
    inputs = [x for x, yes in zip(given, wanted, strict=True) if yes and x is not None]
    found = iter(torch.autograd.grad(plain_experts(groups, weights), inputs, grad, create_graph=True))
    return [next(found) if yes else None for yes in wanted]


_forward.register_autograd(_differentiate, setup_context=_setup)


def _cut(counts: Tensor, slots: int) -> tuple[list[list[tuple[int, int]]], int]:
    """Cuts each expert's rows into ranges of equal length, as near to _CHUNK as that goes: no short one is left over.

    Returns:
        The ranges of each expert, and the length of the longest, which is at most 3/2 _CHUNK.
    """
    sizes = counts.tolist() if slots < 0 else [slots] * counts.shape[0]
    pieces: list[list[tuple[int, int]]] = []
    start = 0
    for size in sizes:
        number = max(round(size / _CHUNK), min(size, 1))
        cuts = [start + size * i // max(number, 1) for i in range(number + 1)]
        pieces.append(list(itertools.pairwise(cuts)))
        start += size
    return pieces, max((end - begin for ranges in pieces for begin, end in ranges), default=0)


def _unstack(x: Tensor | None, num_experts: int) -> Sequence[Any]:
    """The parameters of each expert, all views made in one call."""
    return [None] * num_experts if x is None else x.unbind()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _add_product(a: Tensor, b: Tensor, out: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)


def _add_sum(x: Tensor, out: Tensor, first: bool) -> None:
    if first:
        torch.sum(x, 0, out=out)
    else:
        out.add_(x.sum(0))
