# SPDX-License-Identifier: Apache-2.0
"""Conditionally optimal assignments: the best value given where one row goes, for every row and expert at once.

Legend: b problems (the batch, flattened), n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_matrix, check_same_device, check_shape
from equipoise.assignment._assignment import Assignment
from equipoise.assignment._move_cost import move_cost, relax_prices
from equipoise.ops import floyd_warshall

# What the exact methods of `assign` promise: gap <= this times the larger of |value| and the largest |score|.
_OPTIMAL = 1e-9
# How far the total of the scores may be from the value, relative to the sum of their magnitudes: float32 for float64.
_ROUNDING = 1e-6
# Matrix entries of the problems that a thread takes at once.
_BLOCK = 1 << 15


@torch.no_grad()
def conditional_values(scores: Float[Tensor, "*batch n k"], assignment: Assignment) -> Float[Tensor, "*batch n k"]:
    r"""Computes the value of the best assignment that sends row i to expert j, for every i and j.

    .. math::
        v^*_{|z_i = j} = \max_{z : z_i = j} \sum_{i'} s_{i' z_{i'}}
        \quad \text{s.t.} \quad |\{i' : z_{i'} = j'\}| \le c_{j'} \; \forall j'.

    One solved problem gives all n k values (App. D.3). From the optimum, moving row i from its expert z_i to j costs
    :math:`s_{i z_i} - s_{ij}`, leaves a slot at z_i free and takes one at j. The cheapest way to restore balance is a
    chain of moves from j to z_i, whose cost is a shortest path :math:`d^*` over the move costs at the optimum, so

    .. math::
        v^*_{|z_i = j} = v^* - s_{i z_i} + s_{ij} - d^*_{j z_i}.

    With a free slot at j nothing has to move: a free slot is a dummy row that may leave j at no cost, which the move
    costs account for, wherever on the chain it happens. O(n k + k^3) a problem.

    The softmax over j of these values minus the row's own noise is the conditional distribution of z_i given the noise
    of the other rows (App. D.4).

    Args:
        scores: the scores that were assigned; -inf forbids a pair.
        assignment: an optimal assignment of them, from an exact method of `assign`.

    Returns:
        float64, without gradient. -inf where z_i = j is impossible: the pair is forbidden, the expert has no capacity,
        or no chain can make room; 0 for rows that are masked. In column z_i exactly `assignment.value`.

    Raises:
        ValueError: scores and assignment do not fit together, or the assignment is not optimal.

    Example:
        Rows 0 and 1 go where they score most. Sending row 0 to expert 1 makes row 1 change places with it.

        >>> import torch, equipoise as eq
        >>> scores = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
        >>> eq.conditional_values(scores, eq.assign(scores)).tolist()
        [[5.0, 1.0], [1.0, 5.0]]

        With capacity for both at expert 1, row 1 stays.

        >>> eq.conditional_values(scores, eq.assign(scores, capacity=2)).tolist()
        [[5.0, 4.0], [2.0, 5.0]]

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021),
        appendix D.3 and D.4.
    """
    detour = detour_costs(scores, assignment)
    a = assignment
    return torch.ops.equipoise.conditional_values(scores, a.z, a.mask, a.value, detour)


@torch.no_grad()
def detour_costs(scores: Float[Tensor, "*batch n k"], assignment: Assignment) -> Float[Tensor, "*batch k k"]:
    r"""Computes what it costs to take a slot at expert j and to give one back at j', for every pair of experts.

    That is the shortest path :math:`d^*_{jj'}` in the formula of `conditional_values`:

    .. math::
        v^*_{|z_i = j} = v^* - s_{i z_i} + s_{ij} - d^*_{j z_i}.

    So the conditional distribution of z_i given the other rows' noise is the softmax over j of
    :math:`a_{ij} / \tau - d^*_{j z_i}`, which does not contain the row's own noise.

    Args:
        scores: the scores that were assigned; -inf forbids a pair.
        assignment: an optimal assignment of them, from an exact method of `assign`.

    Returns:
        float64 [..., from j, to j'], without gradient; negative where taking the slot at j is no loss. 0 on the
        diagonal, inf where no chain of moves leads from j to j'.

    Raises:
        ValueError: scores and assignment do not fit together, or the assignment is not optimal.

    Example:
        >>> import torch, equipoise as eq
        >>> scores = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
        >>> detour_costs(scores, eq.assign(scores)).tolist()
        [[0.0, 1.0], [3.0, 0.0]]
    """
    _check_fits(scores, assignment)
    a = assignment
    return torch.ops.equipoise.detour_costs(scores, a.z, a.counts, a.capacity, a.value, a.prices, a.gap)


def detours_from_costs(cost: Float[Tensor, "b k k"], prices: Float[Tensor, "b k"]) -> Float[Tensor, "b k k"]:
    """Computes `detour_costs` from the move costs of an optimal assignment, wherever its rows are.

    The shortest paths are searched over reduced costs d_jj' - p_j + p_j', which makes them differ by p_j - p_j'. At an
    optimum, and at relaxed prices, no row of j prefers j', so reduced costs are >= 0 but for rounding; what is below 0
    is set to 0. (Without an optimum it is the gap at most, which was checked.) This makes path costs too high rather
    than too low, by rounding error. Without it, where rows are tied and cycles cost zero, rounding errors are negative
    cycles, and Floyd-Warshall may double them k times.

    Why the path of row i itself never is a problem: the path from j to z_i ends at z_i, so it uses moves out of other
    experts only, and row i is at z_i. It neither moves twice nor does its absence change a move cost on the path. For
    j = z_i the path is empty. A path through an expert of capacity 0 does not exist, as nothing leads out of one.

    Args:
        cost: from `move_cost`; where rows are in several places, the least of their move costs.
        prices: of the assignment.

    Returns:
        The shortest paths d*, float64.
    """
    p = relax_prices(cost, prices).unsqueeze(1)
    return floyd_warshall((cost - p.mT + p).clamp(min=0)).cost + p.mT - p


def _check_fits(scores: Tensor, a: Assignment) -> None:
    check_matrix("scores", scores)
    if not isinstance(a, Assignment):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"assignment must be an Assignment, got {type(a).__name__}: pass what assign returned for these scores"
        )
    *batch, n, k = scores.shape
    check_shape("assignment.z", a.z, [*batch, n], "one expert for each row of scores")
    check_shape("assignment.counts", a.counts, [*batch, k], "one number for each expert of scores")
    check_same_device("assignment.z", a.z, "scores", scores)


@torch.library.custom_op("equipoise::detour_costs", mutates_args=())
def _detour_costs_op(
    scores: Tensor, z: Tensor, counts: Tensor, capacity: Tensor, value: Tensor, prices: Tensor, gap: Tensor
) -> Tensor:
    *batch, n, k = scores.shape
    b = math.prod(batch)
    flat = scores.reshape(b, n, k)
    _check_optimal(flat, value.reshape(b), gap.reshape(b))
    z, counts, capacity, prices = z.reshape(b, n), counts.reshape(b, k), capacity.reshape(b, k), prices.reshape(b, k)
    if scores.device.type == "cpu":
        from equipoise.assignment._kernels._detours import detour_batch

        out = _run_kernel(detour_batch, (k, k), flat, z, capacity - counts, prices)
    else:
        out = detours_from_costs(move_cost(flat.double(), z, capacity, counts), prices)
    return out.reshape([*batch, k, k])


def _run_kernel(kernel: Callable[..., None], size: tuple[int, int], scores: Tensor, *parts: Tensor) -> Tensor:
    """Computes float64 [b, *size] on the CPU, problem by problem, from scores [b, n, k] and parts [b, ...]."""
    from equipoise._core._threads import cut, run_blocks

    b, n, k = scores.shape
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    out = torch.empty([b, *size], dtype=torch.float64)
    given, result = [x.contiguous().numpy() for x in (scores, *parts)], out.numpy()

    def solve(start: int, stop: int) -> None:
        kernel(*given, start, stop, result)

    run_blocks(solve, cut(b, max(1, _BLOCK // (n * k + 1))))
    return out


@_detour_costs_op.register_fake
def _detour_costs_fake(
    scores: Tensor,
    z: Tensor,  # pyright: ignore[reportUnusedParameter]
    counts: Tensor,  # pyright: ignore[reportUnusedParameter]
    capacity: Tensor,  # pyright: ignore[reportUnusedParameter]
    value: Tensor,  # pyright: ignore[reportUnusedParameter]
    prices: Tensor,  # pyright: ignore[reportUnusedParameter]
    gap: Tensor,  # pyright: ignore[reportUnusedParameter]
) -> Tensor:
    *batch, _, k = scores.shape
    return scores.new_empty([*batch, k, k], dtype=torch.float64)


@torch.library.custom_op("equipoise::conditional_values", mutates_args=())
def _conditional_values_op(scores: Tensor, z: Tensor, mask: Tensor, value: Tensor, detour: Tensor) -> Tensor:
    *batch, n, k = scores.shape
    b = math.prod(batch)
    flat, z, mask = scores.reshape(b, n, k), z.reshape(b, n), mask.reshape(b, n)
    value, detour = value.reshape(b), detour.reshape(b, k, k)
    _check_value(flat, z, value)
    if scores.device.type == "cpu":
        from equipoise.assignment._kernels._detours import conditional_batch

        return _run_kernel(conditional_batch, (n, k), flat, z, mask, value, detour).reshape(scores.shape)
    return add_detours(flat, z, mask, value, detour).reshape(scores.shape)


def add_detours(scores: Tensor, z: Tensor, mask: Tensor, value: Tensor, detour: Tensor) -> Float[Tensor, "b n k"]:
    """Computes `conditional_values` from `detour_costs` on any device: what the kernel does on the CPU."""
    wide, own = scores.double(), z.clamp(max=scores.shape[-1] - 1).unsqueeze(-1)
    change = wide - wide.gather(-1, own) - detour.mT.gather(1, own.expand_as(scores))
    return (value[:, None, None] + change.clamp_max(0.0)).where(mask.unsqueeze(-1), 0.0)


@_conditional_values_op.register_fake
def _conditional_values_fake(
    scores: Tensor,
    z: Tensor,  # pyright: ignore[reportUnusedParameter]
    mask: Tensor,  # pyright: ignore[reportUnusedParameter]
    value: Tensor,  # pyright: ignore[reportUnusedParameter]
    detour: Tensor,  # pyright: ignore[reportUnusedParameter]
) -> Tensor:
    return torch.empty_like(scores, dtype=torch.float64, memory_format=torch.contiguous_format)


def _check_optimal(scores: Tensor, value: Tensor, gap: Tensor) -> None:
    """Requires assignments whose gap proves them optimal."""
    if bool((gap <= _OPTIMAL * value.abs()).all()):
        return
    largest = scores.where(scores.isfinite(), 0.0).abs().amax((1, 2))
    bad = ~(gap <= _OPTIMAL * torch.maximum(value.abs(), largest))
    if bool(bad.any()):
        raise ValueError(
            f"assignment must be optimal, got one with a gap of {float(gap[bad][0]):.3g} at a value of "
            f'{float(value[bad][0]):.6g}: use an exact method of assign, not "auction"'
        )


def _check_value(scores: Tensor, z: Tensor, value: Tensor) -> None:
    """Requires scores that add up to the value at z. Off the CPU nothing is checked: the host would have to wait."""
    if scores.device.type != "cpu":
        return
    k = scores.shape[-1]
    taken = scores.gather(-1, z.clamp_max(k - 1).unsqueeze(-1)).squeeze(-1)
    # Enough where no row is masked and the sum is not nearly 0, at a third of the time.
    if bool(((taken.sum(-1, dtype=torch.float64) - value).abs() <= _ROUNDING * value.abs()).all()):
        return
    taken = taken.double().where(z < k, 0.0)
    total = taken.sum(-1)
    bad = ~(((total - value).abs() <= _ROUNDING * taken.abs().sum(-1)) & total.isfinite())
    if bool(bad.any()):
        raise ValueError(
            f"assignment must be of these scores, got a value of {float(value[bad][0]):.6g} where the scores add up to "
            f"{float(total[bad][0]):.6g}: pass what assign returned for these scores"
        )
