# SPDX-License-Identifier: Apache-2.0
"""A baseline for each token: its loss without the experts, fitted to the loss with them.

Legend: n rows (tokens).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._core import check_fraction, check_shape
from equipoise.nn._bias_rules import WideBuffers
from equipoise.sampling import THIS_PROCESS, Scope

# Below this fraction of the mean square, a variance is rounding, and its inverse noise.
_NO_SPREAD = 1e-8


class ResidualBaseline(WideBuffers):
    r"""Predicts each token's loss from the loss that it has without its expert.

    .. math::
        b_i = \alpha + \beta r_i, \qquad \beta = \frac{\text{Cov}(r, f)}{\text{Var}(r)}, \qquad
        \alpha = \text{E} f - \beta \text{E} r,

    with r_i the loss of token i when the experts' output is left out, f_i its loss with it, and moments that are
    running averages over past batches. Losses differ far more between tokens than between experts. A constant baseline
    leaves those differences in the score-function term, as noise. This baseline removes the part of f that r explains.

    Unbiased when: r_i does not depend on any expert that token i was given. With one layer that is the loss with the
    layer's output left out (the residual stream goes on). With several, leave out **all** of them: an r that depends on
    the expert of an early layer is biased for that layer's router. With attention, leave them out for every token. The
    coefficients come from past batches only; those of the current batch would be biased. Before the first batch alpha =
    0 and beta = 1: r itself.

    The moments are unweighted, over the rows whose weight is not 0. They are in `state_dict`.

    Example:
        >>> baseline = ResidualBaseline()
        >>> r = torch.tensor([1.0, 2.0, 3.0])
        >>> baseline(r)
        tensor([1., 2., 3.])
        >>> baseline.update(2 * r + 1, r)
        >>> baseline(torch.tensor([5.0]))
        tensor([11.])
    """

    moments: Float[Tensor, " 5"]

    def __init__(self, decay: float = 0.99) -> None:
        """Starts with b = r.

        Args:
            decay: the weight of the old moments at each update, in [0, 1).
        """
        super().__init__()
        check_fraction("decay", decay)
        self.decay = decay
        # Sums of decaying weights times 1, r, f, r^2, r f. Divided by the first they are averages from the first batch
        # on. float64, since the variance is a difference of large numbers.
        self.register_buffer("moments", torch.zeros(5, dtype=torch.float64))

    @property
    def coefficients(self) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Returns alpha and beta."""
        total, r, f, rr, rf = self.moments.unbind()
        seen = total > 0
        total = torch.where(seen, total, 1.0)
        r, f, rr, rf = r / total, f / total, rr / total, rf / total
        variance, covariance = rr - r * r, rf - r * f
        spread = variance > _NO_SPREAD * rr
        beta = torch.where(spread, covariance / torch.where(spread, variance, 1.0), 0.0)
        return torch.where(seen, f - beta * r, 0.0), torch.where(seen, beta, 1.0)

    @torch.no_grad()
    def forward(self, residual: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Computes the baseline of each row from past batches.

        Args:
            residual: r.

        Returns:
            b, detached.
        """
        alpha, beta = self.coefficients
        return (alpha + beta * residual).to(torch.promote_types(residual.dtype, torch.float32))

    @torch.no_grad()
    def update(
        self,
        losses: Float[Tensor, "*shape"],
        residual: Float[Tensor, "*shape"],
        counted: Bool[Tensor, "*shape"] | None = None,
        scope: Scope = THIS_PROCESS,
    ) -> None:
        """Takes in a batch, after its estimate has read the baseline.

        Args:
            losses: f.
            residual: r.
            counted: rows to take in; None for all of them. Rows where f or r is not finite are left out, so that one
                bad batch does not stay in the moments. If no row is left, nothing changes.
            scope: of the rows: those of all ranks are taken in.
        """
        check_shape("residual", residual, losses.shape, "one number for each token")
        f, r = losses.double(), residual.double()
        finite = f.isfinite() & r.isfinite()
        counted = finite if counted is None else counted & finite
        one, f, r = counted.double(), torch.where(counted, f, 0.0), torch.where(counted, r, 0.0)
        sums = scope.everywhere(torch.stack([one.sum(), r.sum(), f.sum(), (r * r).sum(), (r * f).sum()]))
        rows = sums[0]
        moved = self.decay * self.moments.to(sums) + (1 - self.decay) * sums / rows.clamp_min(1)
        self.moments.copy_(torch.where(rows > 0, moved, self.moments.to(sums)))
