# SPDX-License-Identifier: Apache-2.0
"""`assign`: the exact balanced assignment of n rows to k experts."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._core import (
    Capacity,
    check_capacity,
    check_mask,
    check_matrix,
    check_one_of,
    check_same_device,
    has_tangent,
    in_transform,
)
from equipoise._core._operators import operator
from equipoise.assignment._assignment import Assignment
from equipoise.assignment._auction import auction_assign
from equipoise.assignment._checks import check_prices, check_top_k
from equipoise.assignment._cycle_cancelling import cycle_cancelling
from equipoise.assignment._infeasible import check_start
from equipoise.assignment._proof import certify
from equipoise.assignment._range import Solved, Solver, solve_in_range
from equipoise.assignment._settle import settle_in_torch

# From scores [b, n, k], capacity [b, k], mask [b, n] or None and prices [b, k] or None: z and prices.
TorchSolver = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


def assign(
    scores: Float[Tensor, "*batch n k"],
    capacity: Capacity = None,
    *,
    top_k: int | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    prices: Float[Tensor, "*batch k"] | None = None,
    method: str = "auto",
) -> Assignment:
    r"""Assigns every row to one expert, or to K, within the experts' capacities and with the largest total score.

    Solves the transportation problem (the paper's eq. 4, with `scores` for a_ij / tau + g_ij)

    .. math::
        \max_z \sum_i s_{i z_i} \quad \text{s.t.} \quad |\{i : z_i = j\}| \le c_j \; \forall j

    for each problem of the batch. With `top_k` = K every row takes K different experts, and the sum is over all of
    them. The dual variables are the experts' `prices`: at optimal prices every row is at the expert where `scores[i, j]
    - prices[j]` is largest, or at the K experts where it is. Prices in the result prove that it is optimal.

    Args:
        scores: what assigning row i to expert j is worth; -inf forbids the pair. float16, bfloat16, float32, float64.
        capacity: rows that an expert may take. None: ceil(K * rows that are not masked / k); an int; one for each
            expert, shape [k]; or one for each problem and expert, shape [..., k], in a list, a NumPy array or a tensor.
            Capacities may sum to more than the rows. Those above 2**40 are no limit, and are returned as 2**40.
        top_k: None: one expert a row, z [..., n]. An int K: K different experts a row, z [..., n, K], best offer first;
            by the methods "primal-dual" and "settle".
        mask: False for rows that take no expert (padding).
        prices: a start from an earlier `Assignment.prices`. It changes the time, not the value of the result.
        method: "primal-dual": exact, on the CPU, compiled; "settle": exact, on any device, which only contested rows
            leave; "cycle-cancelling": exact, the paper's own algorithm, on any device; "auction": the inexact start of
            the latter, as BASE layers use it; "auto": the first on the CPU, the second elsewhere.

    Returns:
        The assignment, with its value, the prices and the optimality gap in float64. The value is differentiable: its
        gradient is 1 at the pairs that were assigned and 0 elsewhere (the envelope theorem; where several assignments
        are optimal, a subgradient). Nothing else carries a gradient. Of several optimal assignments the result is the
        same for the same input, whatever the number of threads. With two experts: of rows that would gain the same by
        expert 0, the first go there. The methods in torch prefer the lowest row, then the lowest expert.

    Raises:
        ValueError: scores are not a floating-point matrix, hold NaN or +inf, forbid so much that nothing feasible is
            left, or are so large that their total is beyond float64; top_k is not between 1 and k; capacities are
            negative, not integers, of the wrong shape or too small for the rows; mask or prices do not fit; tensors are
            on different devices; the method is unknown.

    Example:
        Three rows prefer expert 0, which takes two. The row that loses least by moving goes to expert 1.

        >>> import torch, equipoise as eq
        >>> scores = torch.tensor([[3.0, 1.0], [3.0, 0.0], [3.0, 2.5], [0.0, 1.0]])
        >>> a = eq.assign(scores)
        >>> a.z.tolist(), a.counts.tolist(), a.value.item()
        ([0, 0, 1, 1], [2, 2], 9.5)
        >>> a.prices.tolist(), a.gap.item()
        ([0.5, 0.0], 0.0)

        Two experts a row, of three; each takes at most ceil(2 * 3 / 3) = 2 rows. The better offer comes first, and
        expert 0 has a price.

        >>> eq.assign(torch.tensor([[3.0, 1.0, 0.0], [3.0, 1.0, 0.5], [3.0, 0.0, 1.0]]), top_k=2).z.tolist()
        [[1, 0], [1, 2], [2, 0]]

    References:
        Kool, Maddison, Mnih (2021), section 2.2 and appendix D.2.
        Tokuyama, Nakano (1995), Efficient algorithms for the Hitchcock transportation problem.
    """
    given, each = check_problem(scores, capacity, top_k, mask, prices, method)
    if method == "auto":
        method = "primal-dual" if scores.device.type == "cpu" else "settle"
    elif method == "primal-dual" and scores.device.type != "cpu":
        raise ValueError(
            f'method "primal-dual" needs scores on the CPU, got {scores.device}: use "settle" or scores.cpu()'
        )
    # Within torch.vmap a tensor does not tell whether it is differentiated further out.
    differentiated = (scores.requires_grad and torch.is_grad_enabled()) or in_transform() or has_tangent(scores)
    z, counts, full_capacity, used_mask, value, final_prices, gap = _OPERATOR(
        scores.detach() if differentiated or scores.requires_grad else scores,
        given,
        mask,
        prices.detach() if prices is not None and (differentiated or prices.requires_grad) else prices,
        method,
        each,
    )
    if differentiated:
        value = _with_gradient(value, scores, z, mask)
    if top_k is None:
        z = z.squeeze(-1)
    return Assignment(
        z=z, counts=counts, capacity=full_capacity, mask=used_mask, value=value, prices=final_prices, gap=gap
    )


def check_problem(
    scores: Tensor, capacity: Capacity, top_k: int | None, mask: Tensor | None, prices: Tensor | None, method: str
) -> tuple[Tensor | None, int]:
    """Checks the arguments of `assign` as far as possible without reading values; returns the capacity, and K."""
    check_matrix("scores", scores)
    check_one_of("method", method, ("auto", *METHODS))
    *batch, n, k = scores.shape
    each = 1 if top_k is None else check_top_k(top_k, k, method)
    check_mask(mask, [*batch, n])
    check_same_device("mask", mask, "scores", scores)
    if prices is not None:
        check_prices(prices, (*batch, k))
        check_same_device("prices", prices, "scores", scores)
    if isinstance(capacity, Tensor):
        check_same_device("capacity", capacity, "scores", scores)
    # None is left to the solver: where it works in NumPy anyway, that makes the tensor in a third of the time.
    given = None if capacity is None else check_capacity(capacity, batch, n, k, mask, scores.device)
    return given, each


def _with_gradient(value: Tensor, scores: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
    """Adds zero to the value, with the derivative of the assigned scores' sum.

    That is the derivative of the value itself: where scores change a little, the same assignment remains the best.
    """
    assigned = scores.gather(-1, z if mask is None else z.clamp(max=scores.shape[-1] - 1))
    if mask is not None:
        assigned = assigned.masked_fill(~mask.unsqueeze(-1), 0.0)
    return value + (assigned - assigned.detach()).sum((-2, -1), dtype=torch.float64)


def _assign_fake(
    scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None, method: str, each: int
) -> Solved:
    *batch, n, k = scores.shape
    return (
        scores.new_empty([*batch, n, each], dtype=torch.int64),
        scores.new_empty([*batch, k], dtype=torch.int64),
        scores.new_empty([*batch, k], dtype=torch.int64),
        scores.new_empty([*batch, n], dtype=torch.bool),
        scores.new_empty(batch, dtype=torch.float64),
        scores.new_empty([*batch, k], dtype=torch.float64),
        scores.new_empty(batch, dtype=torch.float64),
    )


@operator("assign", fake=_assign_fake)
def _assign_op(
    scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None, method: str, each: int
) -> Solved:
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    solve: Callable[..., Solved] = METHODS[method]
    if each > 1:
        solve = functools.partial(solve, top_k=each)
    return solve_in_range(solve, scores, capacity, mask, prices)


def _assign_vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Solved, tuple[int, ...]]:
    """Hands the dimension that `torch.vmap` maps over to the operator, as the first of the batch."""
    *tensors, method, each = arguments
    batched = [
        x if x is None else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims[:-2], strict=True)
    ]
    return _OPERATOR(*batched, method, each), (0,) * 7


torch.library.register_vmap("equipoise::assign", _assign_vmap)


@functools.cache
def _compiled_solver() -> Callable[..., Solved]:
    # Imported here because importing Numba takes as long as half a training step of a small model, and because whoever
    # uses another method needs none of it. Once, because even to find it imported already takes 7 us.
    from equipoise.assignment._primal_dual import primal_dual

    return primal_dual


def _solve_compiled(
    scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None, top_k: int = 1
) -> Solved:
    return _compiled_solver()(scores, capacity, mask, prices, top_k)


_OPERATOR = torch.ops.equipoise.assign.default


def certified(solver: TorchSolver) -> Solver:
    """Makes a method of `assign` from a solver for z and prices; computes counts, value and gap from these.

    Args:
        solver: takes one batch dimension, checked input and prices in float64; returns z int64 [b, n] (k where a row is
            masked) and prices float64 [b, k], by the rules of `Assignment`.

    Returns:
        What `METHODS` holds: a function that returns the fields of an `Assignment`.

    Example:
        The first n/k rows to expert 0, the next to expert 1: a method that never looks, and whose gap says so.

        >>> def in_order(scores, capacity, mask, prices):
        ...     b, n, k = scores.shape
        ...     return torch.arange(n).mul(k).div(n, rounding_mode="floor").expand(b, n), torch.zeros(b, k).double()
        >>> z, counts, *_, gap = certified(in_order)(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).flip(0), None, None, None)
        >>> z.squeeze(-1).tolist(), counts.tolist(), gap.item()
        ([0, 1], [1, 1], 2.0)
    """
    return functools.partial(_solve_in_torch, solver)


def _solve_in_torch(
    solver: TorchSolver, scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None
) -> Solved:
    *batch, n, k = scores.shape
    capacity = check_capacity(capacity, batch, n, k, mask, scores.device)
    rows = np.array(n) if mask is None else np.asarray(mask.sum(-1).cpu().numpy())
    check_start(capacity.cpu().numpy(), rows, None if prices is None else prices.double().cpu().numpy())
    problems = math.prod(batch)
    flat, flat_capacity = scores.reshape(problems, n, k), capacity.reshape(problems, k)
    flat_mask = None if mask is None else mask.reshape(problems, n)
    flat_prices = None if prices is None else prices.reshape(problems, k).double()
    z, final_prices = solver(flat, flat_capacity, flat_mask, flat_prices)
    proof = certify(flat, z, final_prices, flat_capacity, flat_mask)
    return (
        z.reshape(*batch, n, 1),
        proof.counts.reshape(*batch, k),
        capacity.clone(),
        scores.new_ones([*batch, n], dtype=torch.bool) if mask is None else mask.clone(),
        proof.value.reshape(batch),
        proof.prices.reshape(*batch, k),
        proof.gap.reshape(batch),
    )


# What `assign` knows by name, apart from "auto". A new method is one row here.
METHODS: dict[str, Solver] = {
    "primal-dual": _solve_compiled,
    "settle": settle_in_torch,
    "cycle-cancelling": certified(cycle_cancelling),
    "auction": certified(auction_assign),
}
