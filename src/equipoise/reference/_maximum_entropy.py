# SPDX-License-Identifier: Apache-2.0
"""The maximum-entropy distribution over balanced assignments with given marginals (App. D.5).

Many distributions over balanced assignments have the marginals of a given balanced matrix. The one whose rows depend
least on one another is alpha_z = prod_i u_{i, z_i} / Perm(U): the Gibbs distribution of eq. (5) at tau = 1 with logits
log u.

Legend: n rows (datapoints), k columns (experts).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_positive
from equipoise.reference._checks import check_balanced_matrix, check_one_problem
from equipoise.reference._gibbs import gibbs_log_marginals


@dataclass(frozen=True, slots=True, eq=False)
class MaximumEntropy:
    """A maximum-entropy distribution, and how its search ended.

    Attributes:
        log_u: the logits of the distribution (`gibbs_distribution(log_u, capacity=...)`). Only defined up to a constant
            added to a row or to a column.
        marginals: those of the distribution that `log_u` gives.
        error: the largest absolute difference between those and the ones asked for.
        converged: whether `error` is within the tolerance.
        iterations: updates made.
        damping: of the last update.

    Example:
        >>> from equipoise import reference
        >>> result = reference.maximum_entropy(torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64))
        >>> result.converged, result.error <= 1e-10, result.marginals.round(decimals=6).tolist()
        (True, True, [[0.9, 0.1], [0.1, 0.9]])
    """

    log_u: Float[Tensor, "n k"]
    marginals: Float[Tensor, "n k"]
    error: float
    converged: bool
    iterations: int
    damping: float


def maximum_entropy(
    marginals: Float[Tensor, "n k"],
    *,
    damping: float | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 5000,
) -> MaximumEntropy:
    """Maximises -sum_z alpha_z log alpha_z subject to sum_z alpha_z z_ij = p_ij, over balanced assignments z.

    The stationary point is u_ij = p_ij Perm(U) / Perm(U_-ij), with U_-ij the matrix without row i and a slot of column
    j. The marginals of U are m_ij = u_ij Perm(U_-ij) / Perm(U), so the paper's fixed-point iteration is
    log u <- log u + (log p - log m), and with damping d it is log u <- log u + d (log p - log m).

    Near the solution a step is stable when d is below 2 over the solution's `variance_inflation`, which lies between 1
    and n. Undamped (d = 1) that fails wherever rows depend strongly: at n = k = 2 always (the log odds of the two
    assignments go from x to 2 x* - x and back for ever), with more rows when p is sharp. At d = 1/n it always
    converges: every assignment uses exactly n of the u_ij, which makes the update generalised iterative scaling.

    Args:
        marginals: p, rows that sum to 1 and columns that sum to whole numbers, which are the capacities, both to
            within `tolerance` (what is not balanced cannot be matched). A zero stays a zero.
        damping: d; None starts from 1/2 and halves it whenever the error grows, down to 1/n.
        tolerance: the largest error of a marginal to accept.
        max_iterations: the cap.

    Returns:
        log u with the marginals that it attains; `converged` says whether to trust them.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> p = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
        >>> result = reference.maximum_entropy(p)
        >>> u = result.log_u.exp()
        >>> result.converged, round((u[0, 0] * u[1, 1] / (u[0, 1] * u[1, 0])).item(), 5)
        (True, 9.0)

    References:
        J. N. Darroch and D. Ratcliff, Generalized iterative scaling for log-linear models, 1972.
    """
    check_positive("tolerance", tolerance)
    slots = check_balanced_matrix("marginals", marginals, tolerance)
    if damping is not None:
        check_positive("damping", damping)
    log_p = marginals.detach().double().log()
    step = 0.5 if damping is None else damping
    log_u, iterations, previous = log_p, 0, float("inf")
    while True:
        log_m = gibbs_log_marginals(log_u, capacity=slots)
        error = float((log_m.exp() - log_p.exp()).abs().amax())
        if error <= tolerance or iterations >= max_iterations:
            return MaximumEntropy(log_u, log_m.exp(), error, error <= tolerance, iterations, step)
        if damping is None and error > previous:
            step = max(step / 2, 1 / len(log_p))
        log_u = torch.where(log_p > -torch.inf, log_u + step * (log_p - log_m), -torch.inf)
        iterations, previous = iterations + 1, error


@dataclass(frozen=True, slots=True, eq=False)
class TemperatureFit:
    """How well log u_ij = log p_ij / tau + r_i + c_j holds.

    Attributes:
        temperature: tau; NaN if log p is itself r_i + c_j, which leaves tau open.
        r_squared: the part of the variation of log u beyond row and column constants that log p / tau explains.
        max_residual: the largest absolute residual.

    Example:
        >>> from equipoise import reference
        >>> log_p = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64).log()
        >>> fit = reference.fit_temperature(3 * log_p + torch.tensor([[1.0], [2.0]]), log_p)
        >>> round(1 / fit.temperature, 9), round(fit.r_squared, 9), fit.max_residual < 1e-9
        (3.0, 1.0, True)
    """

    temperature: float
    r_squared: float
    max_residual: float


def fit_temperature(log_u: Float[Tensor, "n k"], log_p: Float[Tensor, "n k"]) -> TemperatureFit:
    """Fits log u_ij = log p_ij / tau + r_i + c_j by least squares over the finite entries.

    The paper finds u_ij ~ p_ij^(1/tau) empirically. Factors of rows and columns cancel from the distribution, so u is
    only defined up to them and the fit must leave them free: both sides are first projected off such constants.

    Args:
        log_u: logits of a maximum-entropy distribution.
        log_p: the logarithm of its marginals.

    Returns:
        tau and two measures of the residual.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> p = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
        >>> round(reference.fit_temperature(reference.maximum_entropy(p).log_u, p.log()).temperature, 6)
        2.0
    """
    check_one_problem("log_u", log_u)
    check_one_problem("log_p", log_p)
    n, k = log_p.shape
    finite = (log_p > -torch.inf).flatten()
    rows = torch.eye(n, dtype=torch.float64).repeat_interleave(k, 0)
    columns = torch.eye(k, dtype=torch.float64).repeat(n, 1)
    constants = torch.cat([rows, columns], 1)[finite]
    both = torch.stack([log_p.flatten(), log_u.flatten()], 1).double()[finite]
    x, y = (both - constants @ (torch.linalg.pinv(constants) @ both)).unbind(1)
    total, explained = float(y @ y), float(x @ y)
    if float(x @ x) <= 1e-20:
        return TemperatureFit(float("nan"), float("nan"), float("nan"))
    slope = explained / float(x @ x)
    residual = y - slope * x
    return TemperatureFit(1 / slope, 1 - float(residual @ residual) / total, float(residual.abs().amax()))
