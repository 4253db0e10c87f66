# SPDX-License-Identifier: Apache-2.0
"""`Scoring`: what the logits of a foreign gate mean. A router of ours needs none: its logits are those of a softmax.

Legend: T rows (tokens), E experts, K experts a row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import check_at_least, check_one_of, check_positive
from equipoise.ops import log_softmax

FUNCTIONS = ("softmax", "sigmoid")
# What DeepSeek-V3 adds to a sum of sigmoid scores before dividing by it.
_NOT_ZERO = 1e-20


@dataclass(frozen=True, kw_only=True)
class Scoring:
    r"""Turns logits into probabilities, the numbers that are compared, and the factors of the experts' outputs.

    With a the logits, s = softmax(a) or sigmoid(a) the affinities, and b the correction bias,

    .. math::
        p_{ij} = \frac{s_{ij}}{\sum_l s_{il}}, \qquad \text{compared: } a_{ij} \text{, or } s_{ij} + b_j, \qquad
        \text{factor: } \frac{\text{scale} \cdot s_{ij}}{\sum_{l \text{ chosen}} s_{il}},

    where the denominator is 1 without `normalise`. With a softmax and no bias the logits themselves are compared, which
    gives the same order. Prices are in the units of what is compared, so that minus a price is a correction bias.

    Attributes:
        function: "softmax" or "sigmoid".
        normalise: whether the factors of a row's experts are divided by their sum.
        scale: multiplies every factor.
        num_groups: how many groups of neighbouring experts there are.
        kept_groups: how many groups a row may choose from: those where the sum of the two largest numbers is largest.

    Example:
        >>> scoring = Scoring(function="sigmoid", normalise=False, scale=2.0)
        >>> scoring.factors(torch.tensor([[0.0, 3.0]]), torch.tensor([[0]]))
        tensor([[1.]])

    References:
        DeepSeek-AI, DeepSeek-V3 technical report (2024), section 2.1.2.
    """

    function: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_one_of("function", self.function, FUNCTIONS)
        check_positive("scale", self.scale)
        check_at_least("num_groups", self.num_groups, 1)
        check_at_least("kept_groups", self.kept_groups, 1)

    def log_affinities(self, logits: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        """Computes log s.

        Args:
            logits: a.

        Returns:
            With gradient.
        """
        return log_softmax(logits) if self.function == "softmax" else F.logsigmoid(logits)

    def log_p(self, logits: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        """Computes the log-probabilities: affinities that sum to 1.

        Args:
            logits: a.

        Returns:
            With gradient.
        """
        log_s = self.log_affinities(logits)
        return log_s if self.function == "softmax" else log_softmax(log_s)

    def compared(self, logits: Float[Tensor, "T E"], bias: Float[Tensor, "E"] | None) -> Float[Tensor, "T E"]:
        """Computes what decides between experts.

        Args:
            logits: a.
            bias: b; None: 0.

        Returns:
            Without gradient.
        """
        logits = logits.detach()
        if self.function == "softmax" and bias is None:
            return logits
        affinities = logits.softmax(-1) if self.function == "softmax" else logits.sigmoid()
        return affinities if bias is None else affinities + bias.detach()

    def limit(self, compared: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        """Rules out the experts outside a row's groups.

        Args:
            compared: after any prices.

        Returns:
            The same, with -inf for those experts.
        """
        if self.num_groups == self.kept_groups:
            return compared
        by_group = compared.unflatten(-1, (self.num_groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(self.kept_groups, dim=-1, sorted=False).indices, True)
        return by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)

    def factors(self, logits: Float[Tensor, "T E"], indices: Int[Tensor, "T K"]) -> Float[Tensor, "T K"]:
        """Computes the factors of the experts' outputs.

        Args:
            logits: a.
            indices: experts; the factor of E, "no expert", means nothing.

        Returns:
            With gradient.
        """
        log_s = self.log_affinities(logits)
        log_s = log_s.gather(1, indices.clamp_max(logits.shape[-1] - 1))
        if not self.normalise:
            return self.scale * log_s.exp()
        if self.function == "softmax":
            return self.scale * log_s.softmax(-1)
        s = log_s.exp()
        return self.scale * (s / (s.sum(-1, keepdim=True) + _NOT_ZERO))
