# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses on the router: to be added, with a small weight, to what the model minimises.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions. Each gives one number for each problem.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._core import check_mask, check_matrix, check_shape
from equipoise.estimators._checks import check_unbalanced
from equipoise.estimators._log_p_checks import check_log_p
from equipoise.ops import count_groups, largest
from equipoise.sampling import THIS_PROCESS, Sample, Scope


def load_balance_loss(
    log_p: Float[Tensor, "*batch n k"],
    *,
    mask: Bool[Tensor, "*batch n"] | None = None,
    assigned: Sample | None = None,
    scope: Scope = THIS_PROCESS,
) -> Float[Tensor, "*batch"]:
    r"""Penalises routers that prefer some experts.

    .. math::
        k \sum_j F_j P_j, \qquad P_j = \frac{1}{n} \sum_i p_{ij}, \qquad
        F_j = \frac{1}{n} \#\{i : \arg\max_{j'} p_{ij'} = j\}.

    It is 1 for a balanced router. The gradient flows through P alone.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1, with gradient.
        mask: False for rows that do not count. None: the mask of `assigned`, if it is given.
        assigned: count the experts that this sample drew (before any row was dropped) in place of the argmax. A
            balanced assignment is refused: with every F_j = 1/k the loss is the constant 1.
        scope: the rows to average over: those given here, or those of several ranks.

    Returns:
        [...], with gradient for log_p.

    Example:
        >>> load_balance_loss(torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log())
        tensor(1.)
        >>> load_balance_loss(torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log())
        tensor(1.8000)

    References:
        Fedus, Zoph, Shazeer, Switch transformers (2021), eq. (4).
    """
    check_matrix("log_p", log_p)
    check_mask(mask, log_p.shape[:-1])
    check_log_p(log_p, mask)
    k = log_p.shape[-1]
    if assigned is None:
        _, z = largest(log_p.detach())
    else:
        check_unbalanced("assigned", assigned.respects_capacity and assigned.assigns_all)
        check_shape("assigned.z", assigned.z, log_p.shape[:-1], "one expert for each row of log_p")
        z, mask = assigned.z, assigned.mask if mask is None else mask
    counts = count_groups(z, k) if mask is None else count_groups(torch.where(mask, z, k), k + 1)[..., :k]
    load = scope.total(counts) / _num_rows(_at_least_float32(log_p), mask, scope)
    return k * (load * mean_probabilities(log_p, mask, scope)).sum(-1)


def marginal_entropy_loss(
    log_p: Float[Tensor, "*batch n k"], *, mask: Bool[Tensor, "*batch n"] | None = None, scope: Scope = THIS_PROCESS
) -> Float[Tensor, "*batch"]:
    r"""Rewards a mean router distribution that is spread out: minus its entropy.

    .. math::
        \sum_j P_j \log P_j, \qquad P_j = \frac{1}{n} \sum_i p_{ij},

    between -log k, where the experts are equally likely on average, and 0. It depends on the mean of the rows'
    distributions alone, and not on how certain each row is.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1, with gradient.
        mask: False for rows that do not count.
        scope: the rows to average over: those given here, or those of several ranks.

    Returns:
        [...], with gradient for log_p.

    Example:
        >>> marginal_entropy_loss(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log())
        tensor(-0.6931)

    References:
        Bengio, Bacon, Pineau, Precup, Conditional computation in neural networks for faster models (2015).
    """
    check_matrix("log_p", log_p)
    check_mask(mask, log_p.shape[:-1])
    check_log_p(log_p, mask)
    mean_p = mean_probabilities(log_p, mask, scope)
    # Without the floor an expert that no row can reach has derivative log 0.
    floor = torch.finfo(mean_p.dtype).tiny
    return torch.special.xlogy(mean_p, mean_p.clamp_min(floor)).sum(-1)


def conditional_entropy_loss(
    log_p: Float[Tensor, "*batch n k"], *, mask: Bool[Tensor, "*batch n"] | None = None, scope: Scope = THIS_PROCESS
) -> Float[Tensor, "*batch"]:
    r"""Rewards a router that is certain of each single row: the mean entropy of its distributions.

    .. math::
        -\frac{1}{n} \sum_{ij} p_{ij} \log p_{ij},

    between 0, where every row is certain of its expert, and log k. Together with `marginal_entropy_loss`, at equal
    weights, it is minus the mutual information of row and expert. Experts then get different rows, and equally many of
    them, even before the task itself tells them apart.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1, with gradient.
        mask: False for rows that do not count.
        scope: the rows to average over: those given here, or those of several ranks.

    Returns:
        [...], with gradient for log_p.

    Example:
        >>> conditional_entropy_loss(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log())
        tensor(0.3466)

    References:
        Krause, Perona, Gomes, Discriminative clustering by regularized information maximization (2010).
    """
    check_matrix("log_p", log_p)
    check_mask(mask, log_p.shape[:-1])
    check_log_p(log_p, mask)
    log_p = _at_least_float32(log_p)
    counts = log_p > -torch.inf if mask is None else (log_p > -torch.inf) & mask.unsqueeze(-1)
    log_p = torch.where(counts, log_p, 0.0)  # before the product, whose derivative at log 0 would be NaN
    entropies = -torch.where(counts, log_p.exp() * log_p, 0.0).sum([-2, -1])
    return scope.total(entropies) / _num_rows(log_p, mask, scope).squeeze(-1)


def z_loss(
    logits: Float[Tensor, "*batch n k"], *, mask: Bool[Tensor, "*batch n"] | None = None, scope: Scope = THIS_PROCESS
) -> Float[Tensor, "*batch"]:
    """Keeps router logits small: the mean of (log sum_j exp a_ij)^2 over rows.

    Args:
        logits: the router's logits before any softmax, with gradient.
        mask: False for rows that do not count.
        scope: the rows to average over: those given here, or those of several ranks.

    Returns:
        [...], with gradient for logits.

    Example:
        >>> z_loss(torch.tensor([[0.0], [2.0]]))
        tensor(2.)

    References:
        Zoph, Bello, Kumar, Du, Huang, Dean, Shazeer, Fedus, ST-MoE (2022), eq. (5).
    """
    check_matrix("logits", logits)
    check_mask(mask, logits.shape[:-1])
    logits = _at_least_float32(logits)
    if mask is not None:
        logits = torch.where(mask.unsqueeze(-1), logits, 0.0)
    squares = logits.logsumexp(-1) ** 2
    squares = squares if mask is None else torch.where(mask, squares, 0.0)
    return scope.total(squares.sum(-1)) / _num_rows(logits, mask, scope).squeeze(-1)


def mean_probabilities(
    log_p: Float[Tensor, "*batch n k"], mask: Bool[Tensor, "*batch n"] | None = None, scope: Scope = THIS_PROCESS
) -> Float[Tensor, "*batch k"]:
    """Averages the router's probabilities over the rows that are not masked: P_j, with gradient.

    Args:
        log_p: the router's log-probabilities.
        mask: False for rows that do not count.
        scope: the rows to average over.

    Returns:
        [..., k]; 0 where every row is masked.

    Example:
        >>> mean_probabilities(torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log())
        tensor([0.7500, 0.2500])
    """
    log_p = _at_least_float32(log_p)
    p = log_p.exp() if mask is None else torch.where(mask.unsqueeze(-1), log_p, -torch.inf).exp()
    return scope.total(p.sum(-2)) / _num_rows(log_p, mask, scope)


def _at_least_float32(x: Tensor) -> Tensor:
    """Widens half precision, in which thousands of rows cannot be counted or summed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _num_rows(x: Tensor, mask: Tensor | None, scope: Scope) -> Tensor:
    """Counts the rows that are not masked, at least 1, as [..., 1] or [1] in the dtype of x."""
    if mask is None and scope.ranks == 1:
        return x.new_full([1], max(x.shape[-2], 1))
    rows = torch.tensor([x.shape[-2]], device=x.device) if mask is None else mask.sum(-1, keepdim=True)
    return scope.total(rows).clamp_min(1).to(x.dtype)
