# SPDX-License-Identifier: Apache-2.0
"""What the samplers share: from logits and noise to scores, and to the probabilities of what was drawn.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import (
    check_broadcasts,
    check_floating,
    check_mask,
    check_matrix,
    check_same_device,
    check_shape,
    check_temperature,
    checked_choice,
    checked_temperature,
)
from equipoise.balancing import sinkhorn
from equipoise.ops import largest, log_softmax


@dataclass(frozen=True, slots=True)
class Proposal:
    """The distribution that each row would draw from if it were alone.

    Attributes:
        logits: a / tau, or log of its Sinkhorn balancing; unnormalised unless it was balanced. At least float32.
        deterministic: whether tau = 0, for all problems or for each; the logits are then a itself, and take no noise.
        mask: rows that take an expert; None for all of them.
    """

    logits: Float[Tensor, "*batch n k"]
    deterministic: bool | Bool[Tensor, "..."]
    mask: Bool[Tensor, "*batch n"] | None

    def scores(self, gumbel: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
        """Perturbs the logits: s = a / tau + g, and s = a where tau = 0."""
        if self.deterministic is True:
            return self.logits
        return self.logits + self.noise(gumbel)

    def noise(self, gumbel: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
        """Returns the noise as it was added: 0 where tau = 0."""
        if isinstance(self.deterministic, bool):
            return torch.zeros_like(gumbel) if self.deterministic else gumbel
        return gumbel * ~self.deterministic[..., None, None]

    def log_q(self, log_q: Float[Tensor, "*batch n k"], z: Int[Tensor, "*batch n"]) -> Float[Tensor, "*batch n k"]:
        """Puts in what was really used: one-hot at z where tau = 0, rows of 0 where masked."""
        if self.deterministic is not False:
            chosen = torch.arange(log_q.shape[-1], device=z.device) == z.unsqueeze(-1)
            one_hot = torch.zeros_like(log_q).masked_fill_(~chosen, -torch.inf)
            if isinstance(self.deterministic, Tensor):
                one_hot = torch.where(self.deterministic[..., None, None], one_hot, log_q)
            log_q = one_hot
        return log_q if self.mask is None else torch.where(self.mask.unsqueeze(-1), log_q, 0.0)


def propose(
    logits: Tensor, gumbel: Tensor, temperature: float | int | Tensor, mask: Tensor | None, *, sinkhorn_first: bool
) -> Proposal:
    """Checks what every sampler takes, and applies temperature and balancing.

    With `sinkhorn_first` the proposal is sinkhorn(a / tau): columns that sum to n / k, section 2.3 of the paper.
    """
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
        logits = sinkhorn(logits, mask=mask).log_p
    return Proposal(logits, deterministic, mask)


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
    deterministic = zero if torch.compiler.is_compiling() or bool(zero.any()) else False
    return scale.masked_fill(zero, 1.0)[..., None, None], deterministic


def draw_each_row(proposal: Proposal, gumbel: Float[Tensor, "*batch n k"]) -> tuple[Tensor, Tensor]:
    """Draws every row on its own with the Gumbel-max trick: z_i = argmax_j a_ij / tau + g_ij.

    Returns:
        z, k for masked rows, and log_q.
    """
    best, z = largest(proposal.scores(gumbel))
    if proposal.mask is not None:
        best = torch.where(proposal.mask, best, 0.0)
        z = torch.where(proposal.mask, z, gumbel.shape[-1])
    z = checked_choice(z, best)
    # A masked row's z matches no column, so the one-hot row is all -inf until the mask puts 0.
    return z, proposal.log_q(log_softmax(proposal.logits), z)


def keep_all(mask: Tensor | None, z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns kept and keep_weight for a sample that drops no row."""
    if mask is None:
        return torch.ones_like(z, dtype=torch.bool), torch.ones_like(z, dtype=dtype)
    return mask, mask.to(dtype)
