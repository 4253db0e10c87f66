# SPDX-License-Identifier: Apache-2.0
"""Code that the samplers share: scores from logits and noise, and the probabilities of what was drawn.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import (
    check_eps,
    check_floating,
    check_mask,
    check_matrix,
    check_same_device,
    check_shape,
    check_temperature,
    checked_choice,
    checked_eps,
    checked_temperature,
    is_batched,
)
from equipoise.ops import largest, log_softmax
from equipoise.sampling._checks import check_broadcasts, check_coin
from equipoise.sampling._scope import THIS_PROCESS, Scope

# The relative column error of the prices that a flat row sees.
_PRICE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """The second component of a mixture: with probability eps a row draws any expert about equally likely.

    Attributes:
        logits: `prices`, the same for every row, but -inf where the pair is forbidden to the row. What a row pays for
            an expert cancels them, so that all that are allowed to it are about as likely; exactly where prices are 0
            and no row competes with another.
        prices: that the logits consist of, [..., 1, k]; a function of the proposal's logits, never of the noise.
        eps: the probability, [...] or [].
        drawn: the rows that draw from it.
    """

    logits: Float[Tensor, "*batch n k"]
    prices: Float[Tensor, "..."]
    eps: Float[Tensor, "..."]
    drawn: Bool[Tensor, "..."]


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """The distribution that each row would draw from without other rows.

    Attributes:
        logits: a / tau, or log of its Sinkhorn balancing; unnormalised unless it was balanced. At least float32.
        deterministic: whether tau = 0, for all problems or for each; the logits are then a itself, and take no noise.
        mask: rows that take an expert; None for all of them.
        flat: what is mixed in; None for nothing.
    """

    logits: Float[Tensor, "*batch n k"]
    deterministic: bool | Bool[Tensor, "..."]
    mask: Bool[Tensor, "*batch n"] | None
    flat: Flat | None = None

    def scores(self, gumbel: Float[Tensor, "*solves n k"]) -> Float[Tensor, "*solves n k"]:
        """Perturbs the logits: s = a / tau + g, with flat logits for a in rows below eps; s = a if tau = 0."""
        if self.deterministic is True:
            return self.logits.expand(gumbel.shape)
        logits = self.logits
        if self.flat is not None:
            logits = torch.where(self.flat.drawn.unsqueeze(-1), self.flat.logits, logits)
        return logits + self.noise(gumbel)

    def noise(self, gumbel: Float[Tensor, "*solves n k"]) -> Float[Tensor, "*solves n k"]:
        """Returns the noise as it was added: 0 where tau = 0."""
        if isinstance(self.deterministic, bool):
            return torch.zeros_like(gumbel) if self.deterministic else gumbel
        return gumbel * ~self.deterministic[..., None, None]

    def log_mixture(self, cost: Float[Tensor, "..."] | None = None) -> Float[Tensor, "*solves n k"]:
        """Computes (1 - eps) softmax_j(a_ij / tau - cost_ij) + eps softmax_j(flat_ij - cost_ij), as a logarithm.

        The one formula behind every sampler: it draws the expert where a / tau + g - cost, or flat + g - cost, is
        largest, by the Gumbel-max trick. Nothing competes with an independent row: no cost. In Gumbel-Matching
        cost_ij = d*_jz, what the other rows lose by making room for row i at j. Costs come with rows last, [..., k, n]
        or [..., k, 1], where operations on a few experts are vectorised; inf is an expert that is out of reach.
        """
        main = _log_softmax_less(self.logits, cost)
        if self.flat is None:
            return main
        flat = _log_softmax_less(self.flat.logits, cost)
        eps = self.flat.eps[..., None, None]
        return torch.logaddexp(main + (-eps).log1p(), flat + eps.log())

    def over_solves(self) -> "Proposal":
        """Puts a dimension of size 1 in front of the rows, over which m solves broadcast."""
        cold = self.deterministic
        flat = self.flat
        if flat is not None:
            prices = flat.prices.unsqueeze(-3)
            flat = replace(flat, logits=flat.logits.unsqueeze(-3), prices=prices, eps=flat.eps.unsqueeze(-1))
        return Proposal(
            self.logits.unsqueeze(-3),
            cold if isinstance(cold, bool) else cold.unsqueeze(-1),
            None if self.mask is None else self.mask.unsqueeze(-2),
            flat,
        )

    def log_q(self, log_q: Float[Tensor, "*batch n k"], z: Int[Tensor, "*batch n"]) -> Float[Tensor, "*batch n k"]:
        """Sets the rows that are not random: one-hot at z where tau = 0, 0 where masked."""
        if self.deterministic is not False:
            chosen = torch.arange(log_q.shape[-1], device=z.device) == z.unsqueeze(-1)
            one_hot = torch.zeros_like(log_q).masked_fill_(~chosen, -torch.inf)
            if isinstance(self.deterministic, Tensor):
                one_hot = torch.where(self.deterministic[..., None, None], one_hot, log_q)
            log_q = one_hot
        return log_q if self.mask is None else torch.where(self.mask.unsqueeze(-1), log_q, 0.0)


def _log_softmax_less(logits: Tensor, cost: Tensor | None) -> Tensor:
    return log_softmax(logits) if cost is None else torch.log_softmax(logits.mT - cost, -2).mT


def propose(
    logits: Tensor,
    gumbel: Tensor,
    temperature: float | int | Tensor,
    mask: Tensor | None,
    *,
    sinkhorn_first: bool,
    scope: Scope,
    solves: bool = False,
) -> Proposal:
    """Checks the arguments that all samplers have, and applies temperature and balancing.

    With `sinkhorn_first` the proposal is sinkhorn(a / tau): columns that sum to n / k, section 2.3 of the paper. With
    `solves` the noise has a dimension that the logits do not have, and the caller has checked the shapes of both.
    """
    if not solves:
        check_matrix("logits", logits)
        check_shape("gumbel", gumbel, logits.shape, "one number for each entry of logits")
    check_floating("gumbel", gumbel)
    check_same_device("gumbel", gumbel, "logits", logits)
    check_mask(mask, logits.shape[:-1])
    check_same_device("mask", mask, "logits", logits)
    logits = logits.detach()
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    scale, deterministic = _resolve_temperature(temperature, logits, positive=sinkhorn_first)
    if isinstance(scale, Tensor) or scale != 1:  # a division by 1 would be a pass over the matrix for nothing
        logits = logits / scale
    if sinkhorn_first:
        logits = scope.sinkhorn(logits, mask=mask).log_p
    return Proposal(logits, deterministic, mask)


def mix_flat(
    proposal: Proposal,
    eps: float | int | Tensor,
    coin: Tensor | None,
    shape: list[int],
    slots: Tensor | None = None,
    scope: Scope = THIS_PROCESS,
) -> Proposal:
    """Mixes the flat component in, with probability eps for each row.

    Args:
        proposal: what to mix with.
        eps: one number, or one for each problem; 0 leaves the proposal as it is.
        coin: uniform numbers of this shape; rows below eps draw from the flat component.
        shape: [..., n], or more dimensions in front of the rows than the proposal has.
        slots: capacities int64 [..., k] that rows compete for; the prices are then Sinkhorn's for them, of the
            proposal's logits. None where rows do not compete: the prices are 0.
        scope: the rows that compete.

    Returns:
        The mixture.
    """
    weight = _resolve_eps(eps, proposal)
    if weight is None:
        return proposal
    coin = check_coin(coin, shape, proposal.logits)
    if isinstance(eps, Tensor) and not _hidden(weight) and not bool(weight.any()):
        return proposal
    a = proposal.logits
    prices = a.new_zeros([]) if slots is None else _prices(a, slots, proposal.mask, scope)
    # Keeps NaN and infinities as they are: forbidden pairs stay forbidden, and what is illegal is found out.
    logits = torch.where(a.isfinite(), prices, a)
    extra = coin.ndim - (a.ndim - 1)
    drawn = coin < weight.reshape([*weight.shape, *[1] * (extra + 1)])
    return replace(proposal, flat=Flat(logits, prices, weight, drawn))


def _prices(logits: Tensor, slots: Tensor, mask: Tensor | None, scope: Scope) -> Tensor:
    """Sinkhorn's prices, [..., 1, k]: a function of the logits alone, so that they say nothing about a row's noise.

    Any such function would be exact. These make rows that see them as logits indifferent on average, and a part in a
    thousand is far less than the noise of the other rows moves what a row pays.
    """
    balanced = scope.sinkhorn(logits, slots, mask=mask, tolerance=_PRICE_TOLERANCE)
    return balanced.prices.to(logits.dtype).unsqueeze(-2)


def _resolve_eps(eps: float | int | Tensor, proposal: Proposal) -> Tensor | None:
    """Returns the mixture weight, [...] or [], in the dtype of the logits; None where it is the number 0."""
    logits, cold = proposal.logits, proposal.deterministic
    if not isinstance(eps, Tensor):
        check_eps(eps, cold is True)
        if eps == 0:
            return None
        weight = torch.full([], eps, dtype=logits.dtype, device=logits.device)
        return checked_eps(weight, cold) if isinstance(cold, Tensor) else weight
    check_broadcasts("eps", eps, logits.shape[:-2])
    if isinstance(cold, bool):
        cold = torch.ones([], dtype=torch.bool, device=eps.device) if cold else None
    return checked_eps(eps.detach(), cold).to(logits)


def _resolve_temperature(
    temperature: float | int | Tensor, logits: Tensor, *, positive: bool
) -> tuple[float | Tensor, bool | Tensor]:
    """Returns what to divide by (1 where the temperature is 0) and where it is 0."""
    if not isinstance(temperature, Tensor):
        check_temperature(temperature, positive)
        return (1.0, True) if temperature == 0 else (float(temperature), False)
    check_broadcasts("temperature", temperature, logits.shape[:-2])
    scale: Tensor = checked_temperature(temperature.detach(), positive).to(logits)
    zero = scale.eq(0)
    # The check has just read the values, so eager code may look once more and skip the passes that only zeros need.
    deterministic = zero if _hidden(zero) or bool(zero.any()) else False
    return scale.masked_fill(zero, 1.0)[..., None, None], deterministic


def _hidden(x: Tensor) -> bool:
    """Tells whether there are no values to look at: within `torch.compile` or `torch.vmap`, or on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta or is_batched(x)


def draw_each_row(proposal: Proposal, gumbel: Float[Tensor, "*batch n k"]) -> tuple[Tensor, Tensor]:
    """Draws every row independently with the Gumbel-max trick: z_i = argmax_j a_ij / tau + g_ij.

    Returns:
        z, k for masked rows, and log_q.
    """
    best, z = largest(proposal.scores(gumbel))
    if proposal.mask is not None:
        best = torch.where(proposal.mask, best, 0.0)
        z = torch.where(proposal.mask, z, gumbel.shape[-1])
    z = checked_choice(z, best)
    # A masked row's z matches no column, so the one-hot row is all -inf until the mask puts 0.
    return z, proposal.log_q(proposal.log_mixture(), z)


def keep_all(mask: Tensor | None, z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns kept and keep_weight for a sample that drops no row."""
    if mask is None:
        return torch.ones_like(z, dtype=torch.bool), torch.ones_like(z, dtype=dtype)
    return mask, mask.to(dtype)
