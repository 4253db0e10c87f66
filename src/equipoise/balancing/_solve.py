# SPDX-License-Identifier: Apache-2.0
"""From logits and targets to prices: temperatures from high to 1, a sample of the rows first, float64 if needed.

Legend: b problems of a group, n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from equipoise.balancing._feasible import require_pattern
from equipoise.balancing._newton import RADIUS_LEAST, State, advance, begin
from equipoise.balancing._problem import Problem, count_rows, is_tight, log_probabilities, prepare

# Matrix entries of the problems that are solved together: enough that the cost of a call is spread over them.
_GROUP = 1 << 18
# Rows of the two-column problems that a thread takes at once.
_PAIR_BLOCK = 1 << 13
# Rows that tell the scale of a problem's logits.
_PROBE = 32
# The first temperature, as a fraction of a typical distance between a row's maximum and its mean.
_SHARPNESS = 8.0
# Large matrices are balanced on every 16th row first, while that leaves 16 rows for each column.
_STRIDE = 16
_LARGE = 1 << 20
_SAMPLE_ERROR = 0.05
# Whoever has not converged by now may have no solution; the prices tell.
_SUSPICIOUS = 60
# log p below this underflows to p = 0 in float64 too (the least is exp(-745)).
_UNDERFLOW = 800.0


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """What the operator returns, for all problems: see `Balanced`."""

    log_p: Tensor
    prices: Tensor
    converged: Tensor
    iterations: Tensor
    error: Tensor


def log_p_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of log_p: that of the logits, but at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def solve(logits: Tensor, mask: Tensor | None, target: Tensor, tolerance: float, max_iterations: int) -> Solution:
    """Balances logits [b, n, k] with targets [b, k], group by group."""
    b, n, k = logits.shape
    if b == 0 or n == 0:
        return _nothing(logits)
    if k == 2 and logits.device.type == "cpu":
        return _solve_pairs(logits, mask, target, tolerance, max_iterations)
    return _solve_groups(logits, mask, target, tolerance, max_iterations)


def _solve_pairs(
    logits: Tensor, mask: Tensor | None, target: Tensor, tolerance: float, max_iterations: int
) -> Solution:
    """Balances [b, n, 2] one by one; whatever is unusual goes the general way."""
    from equipoise._core._threads import cut, run_blocks
    from equipoise.balancing._two_columns import balance_pairs

    b, n, k = logits.shape
    dtype = log_p_dtype(logits.dtype)
    found = Solution(
        log_p=torch.empty([b, n, k], dtype=dtype),
        prices=torch.zeros([b, k], dtype=torch.float64),
        converged=torch.empty(0),
        iterations=torch.empty(b, dtype=torch.int64),
        error=torch.empty(b, dtype=torch.float64),
    )
    rows = torch.ones([b, n], dtype=torch.bool) if mask is None else mask
    x, m, c = (t.detach().contiguous().numpy() for t in (logits.to(dtype).mT, rows, target))
    outputs = [t.numpy() for t in (found.log_p, found.prices, found.iterations, found.error)]

    def solve(start: int, stop: int) -> None:
        balance_pairs(x, m, c, tolerance, max_iterations, start, stop, *outputs)

    run_blocks(solve, cut(b, max(1, _PAIR_BLOCK // n)))
    unusual = found.error == torch.inf
    found = replace(found, converged=found.error <= tolerance)
    if not bool(unusual.any()):
        return found
    rest = _solve_groups(
        logits[unusual], None if mask is None else mask[unusual], target[unusual], tolerance, max_iterations
    )
    for field in fields(Solution):
        getattr(found, field.name)[unusual] = getattr(rest, field.name)
    return found


def _solve_groups(
    logits: Tensor, mask: Tensor | None, target: Tensor, tolerance: float, max_iterations: int
) -> Solution:
    """Balances groups of problems that are solved together."""
    b, n, k = logits.shape
    size = max(1, _GROUP // (n * k))
    groups = [slice(start, start + size) for start in range(0, b, size)]
    parts = [
        _solve_group(logits[g], None if mask is None else mask[g], target[g], tolerance, max_iterations) for g in groups
    ]
    if len(parts) == 1:
        return parts[0]
    return Solution(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Solution)))


def _nothing(logits: Tensor) -> Solution:
    """No rows, nothing to balance."""
    b, _, k = logits.shape
    return Solution(
        log_p=logits.to(log_p_dtype(logits.dtype), copy=True),
        prices=logits.new_zeros(b, k, dtype=torch.float64),
        converged=logits.new_ones(b, dtype=torch.bool),
        iterations=logits.new_zeros(b, dtype=torch.int64),
        error=logits.new_zeros(b, dtype=torch.float64),
    )


def _solve_group(
    logits: Tensor, mask: Tensor | None, target: Tensor, tolerance: float, max_iterations: int
) -> Solution:
    dtype = log_p_dtype(logits.dtype)
    problem = prepare(logits, mask, target, dtype)
    spread = _typical_spread(problem)
    if dtype == torch.float32 and _rounding(problem, spread) > tolerance / 2:
        problem = prepare(logits, mask, target, torch.float64)
    state = _first_guess(problem, spread, max_iterations)
    state = _iterate(problem, state, tolerance, min(int(state.iterations.max()) + _SUSPICIOUS, max_iterations))
    if not bool(_solved(state, tolerance).all()):
        require_pattern(logits, mask, target, state.prices)
        state = _iterate(problem, state, tolerance, max_iterations)
    if not bool(_solved(state, tolerance).all()):
        problem = prepare(logits, mask, target, torch.float64)
        state = _finish(problem, state, tolerance, max_iterations)
        require_pattern(logits, mask, target, state.prices)
    prices = state.prices
    if bool((target == 0).any()):
        problem, prices = _close_columns(logits, mask, target, problem.x.dtype, prices)
    return Solution(
        log_p=log_probabilities(problem, prices, dtype),
        prices=prices,
        converged=_solved(state, tolerance),
        iterations=state.iterations,
        error=state.error,
    )


def solve_spread(
    logits: Tensor,
    mask: Tensor | None,
    target: Tensor,
    tolerance: float,
    max_iterations: int,
    reduce: Callable[[Tensor], Tensor],
) -> Solution:
    """Balances problems whose rows several hold; prices, error and iterations come out the same for each of them.

    Args:
        logits: [b, n, k], of the caller's rows.
        mask: [b, n], of these.
        target: what each column of all rows may sum to, float64 [b, k], above 0.
        tolerance: the relative column error to stop at.
        max_iterations: how often the column sums may be evaluated.
        reduce: adds up over all who hold rows.
    """
    problem = prepare(logits, mask, target, log_p_dtype(logits.dtype))
    rows = count_rows(logits, mask)
    spread = _typical_spread(problem) if logits.shape[-2] else torch.zeros_like(rows)
    total, weighted = reduce(torch.stack([rows, rows * spread])).unbind()
    tight = is_tight(target, total)[:, None].expand_as(target)
    problem = replace(problem, tight=tight, reduce=reduce)
    temperature = (weighted / total.clamp_min(1) / _SHARPNESS).clamp(min=1)
    state = begin(problem, torch.zeros_like(target), temperature)
    state = _iterate(problem, state, tolerance, max_iterations)
    return Solution(
        log_p=log_probabilities(problem, state.prices, log_p_dtype(logits.dtype)),
        prices=state.prices,
        converged=_solved(state, tolerance),
        iterations=state.iterations,
        error=state.error,
    )


def _solved(state: State, tolerance: float) -> Tensor:
    return (state.error <= tolerance) & (state.temperature == 1)


def _finish(problem: Problem, state: State, tolerance: float, max_iterations: int) -> State:
    """Goes on in float64 where float32 had too few digits, and reads the error of the rest at temperature 1."""
    rest = ~_solved(state, tolerance)
    problem, before = problem.take(rest), state.take(rest)
    # Out of iterations: what was found is evaluated once more, for the report.
    spent = before.iterations.clamp(max=max_iterations - 1)
    finer = begin(problem, before.prices, torch.ones_like(before.temperature), spent)
    return state.put(rest.nonzero()[:, 0], _iterate(problem, finer, tolerance, max_iterations))


def _iterate(problem: Problem, state: State, tolerance: float, max_iterations: int) -> State:
    """Advances every problem until it is within the tolerance, stalls, or has used up its iterations."""
    result, where = state, torch.arange(state.error.shape[0], device=state.error.device)
    while True:
        stalled = (state.radius < RADIUS_LEAST) & (state.temperature == 1)
        going = ~_solved(state, tolerance) & ~stalled & (state.iterations < max_iterations)
        count = int(going.sum())
        if count == 0:
            return state if state.error.shape == result.error.shape else result.put(where, state)
        # Problems that are done wait, unchanged, until half of the group is.
        if 2 * count <= going.numel():
            result = result.put(where, state)
            problem, state, where, going = problem.take(going), state.take(going), where[going], going[going]
        state = advance(problem, state, going)


def _first_guess(problem: Problem, spread: Tensor, max_iterations: int) -> State:
    """Starts hot, where the dual is nearly quadratic; on a sample of the rows if there are many.

    Sharp logits make the dual piecewise linear, and Newton's method blind: only rows between two experts show in the
    Hessian. At a temperature of the order of the logits every row shows, and the minimum moves little as it falls.
    """
    temperature = (spread / _SHARPNESS).clamp(min=1)
    prices = torch.zeros_like(problem.target)
    large = problem.x.numel() >= _LARGE and problem.rows >= _STRIDE * _STRIDE * prices.shape[-1]
    if not large or max_iterations == 1:
        return begin(problem, prices, temperature)
    sample = problem.thin(_STRIDE)
    if float(sample.target.sum()) < _STRIDE * prices.shape[-1]:
        return begin(problem, prices, temperature)
    cap = min(_SUSPICIOUS, -(-max_iterations // 2))
    tried = _iterate(sample, begin(sample, prices, temperature), _SAMPLE_ERROR, cap)
    # Forbidden pairs may leave the sample without a solution; its prices have then run away.
    if bool((tried.error <= _SAMPLE_ERROR).all()):
        prices, temperature = tried.prices, torch.ones_like(temperature)
    return begin(problem, prices, temperature, tried.iterations)


def _typical_spread(problem: Problem) -> Tensor:
    """How far a row's maximum is above its mean, averaged over some rows (x has maximum 0), float64 [b]."""
    sample = problem if problem.rows <= _PROBE else problem.thin(problem.rows // _PROBE)
    x = sample.x.masked_fill(sample.x == -torch.inf, 0.0)
    if sample.weight is None:
        return -x.mean((-2, -1)).double()
    entries = sample.weight.sum((-2, -1)).clamp(min=1) * problem.target.shape[-1]
    return -(x * sample.weight).sum((-2, -1)).double() / entries


def _rounding(problem: Problem, spread: Tensor) -> float:
    """What rounding in the passes does to a column sum, relatively, at worst over the group."""
    averaged = problem.target.amin(-1).clamp(min=1).sqrt()
    return float((spread / averaged).max()) * torch.finfo(problem.x.dtype).eps / 2


def _close_columns(
    logits: Tensor, mask: Tensor | None, target: Tensor, dtype: torch.dtype, prices: Tensor
) -> tuple[Problem, Tensor]:
    """Finds finite prices at which the columns with target 0 are empty; returns them and the unreduced problem."""
    whole = prepare(logits, mask, target, dtype, forbid=False)
    x = (whole.x.mT if whole.rows_last else whole.x).double()
    closed = target == 0
    utility = torch.logsumexp((x - prices[:, None]).masked_fill(closed[:, None], -torch.inf), -1, keepdim=True)
    if mask is not None:
        utility = utility.masked_fill(~mask[..., None], torch.inf)
    needed = (x - utility).amax(-2) + _UNDERFLOW
    # Without rows nothing needs to be kept out.
    needed = needed.masked_fill(~needed.isfinite(), 0.0).clamp(min=0)
    return whole, torch.where(closed, needed, prices)
