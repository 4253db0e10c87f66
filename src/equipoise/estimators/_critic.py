# SPDX-License-Identifier: Apache-2.0
"""A critic: predicts the loss of every row at every expert, from past batches, as a control variate for `reinforce`.

Legend: n rows (datapoints), k columns (experts), F features of a row, ... batch dimensions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_at_least, check_floating, check_fraction, check_shape, compact_repr
from equipoise.estimators._checks import check_features, check_num_experts, check_one_round
from equipoise.sampling import Sample

# Added to the correlation matrix of the features, with one row's worth, 1 / rows, on top.
_RIDGE = 1e-6
# Below this fraction of the mean square a variance counts as none. Its rounding, 1e-16 / 1e-9, stays below the ridge.
_NO_SPREAD = 1e-9


class RegressionCritic:
    r"""Least squares of the losses on the features of a row, for each expert, over past batches.

    .. math::
        c_{ij} = \alpha_j + \beta_j^\top x_i, \qquad (\alpha_j, \beta_j) = \arg\min \sum_t \lambda^{T - t}
        \sum_{i : z_i^t = j} \left( f_i^t - \alpha_j - \beta_j^\top x_i^t \right)^2 + \text{ridge},

    over the rows that expert j has processed. Only sums are kept (the normal equations, in float64). The ridge is (1e-6
    + 1 / rows) times the variance of each feature, about the effect of one more row with slope 0. It does not depend on
    the features' units, leaves the intercept alone, and makes the fit well-posed from the first row on. An expert that
    has processed no row yet is predicted to have the mean loss of the others; before the first batch all is 0.

    Without features it is the running mean of each expert's losses.

    Unbiased when: it is read before it is updated with the same batch, so that c depends on past batches only. First
    `c = critic(x)`, then `reinforce(..., critic=c)`, then `critic.update(x, s, losses)`. A critic that was updated with
    the current batch before it is read depends on the experts that were drawn, and the estimate is **biased**. This
    cannot be detected, because two batches may have the same features. The features of a row may not depend on its
    expert either.

    Example:
        >>> import equipoise.sampling as sampling
        >>> critic = RegressionCritic(num_experts=2, num_features=1)
        >>> x = torch.linspace(-1.0, 1.0, 100)[:, None]
        >>> s = sampling.sample_independent(torch.cat([x, -x], -1), torch.zeros(100, 2))
        >>> critic(x).shape  # zeros at first; pass it on as reinforce(..., critic=critic(x))
        torch.Size([100, 2])
        >>> critic.update(x, s, losses=3.0 + 2.0 * x[:, 0])
        >>> critic(torch.tensor([[0.5]])).round(decimals=1)
        tensor([[4., 4.]])

    References:
        Mnih, Gregor, Neural variational inference and learning in belief networks (2014), section 2.3, for baselines
        that are fitted alongside. Gu et al., MuProp: unbiased backpropagation for stochastic neural networks (2016),
        for a control variate whose expectation is added back.
    """

    def __init__(
        self, num_experts: int, num_features: int = 0, *, decay: float = 0.99, shape: Sequence[int] = ()
    ) -> None:
        """Starts at 0.

        Args:
            num_experts: k.
            num_features: F. With 0 the critic is the running mean of each expert's losses.
            decay: lambda in [0, 1), the weight of the past when an expert processes another batch of rows.
            shape: () for one critic, fitted to all batch dimensions; or the batch dimensions, for a critic each.
        """
        check_at_least("num_experts", num_experts, 1, "give the number of experts that a row may go to")
        check_at_least("num_features", num_features, 0, "give the number of features of a row, 0 for a running mean")
        check_fraction("decay", decay)
        self.num_experts, self.num_features, self.decay, self.shape = num_experts, num_features, decay, tuple(shape)
        # Decayed sums over rows of the products of (1, features) with (1, features, loss).
        size = (*self.shape, num_experts, num_features + 1, num_features + 2)
        self.moments: Tensor = torch.zeros(size, dtype=torch.float64)
        self._fit: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        """Shows the settings."""
        sizes = {"num_experts": self.num_experts, "num_features": self.num_features}
        return compact_repr(self, **sizes, decay=self.decay, shape=self.shape or None)

    @property
    def coefficients(self) -> tuple[Float[Tensor, "*shape k"], Float[Tensor, "*shape k F"]]:
        """Returns alpha and beta, float64; fitted when they are first read after an update."""
        if self._fit is None:
            self._fit = _fit(self.moments)
        return self._fit

    @torch.no_grad()
    def __call__(self, features: Float[Tensor, "*batch n F"]) -> Float[Tensor, "*batch n k"]:
        """Predicts the loss of each row at every expert, from past batches.

        Args:
            features: x, what is known of a row before its expert is drawn; [..., n, 0] without features. The batch
                dimensions are those of `shape`, or any for ().

        Returns:
            c, detached, at least float32.
        """
        check_features(features, self.shape, self.num_features)
        dtype = torch.promote_types(features.dtype, torch.float32)
        alpha, beta = (x.to(features.device, dtype) for x in self.coefficients)
        # Rows last in memory, where there are more of them than experts.
        return (beta @ features.detach().to(dtype).mT + alpha.unsqueeze(-1)).mT

    @torch.no_grad()
    def update(self, features: Float[Tensor, "*batch n F"], s: Sample, losses: Float[Tensor, "*batch n"]) -> None:
        """Takes in a batch, after its estimate has read the critic. Rows that were dropped or are masked do not count.

        Args:
            features: x, as they were for the prediction; finite in all rows that are not masked.
            s: the sample.
            losses: f(x_i, z_i).
        """
        check_features(features, self.shape, self.num_features)
        check_one_round("RegressionCritic", len(s.rounds))
        check_num_experts(self.num_experts, s.log_q)
        check_shape("losses", losses, s.z.shape, "one loss a row, f(x_i, z_i)")
        check_floating("losses", losses)
        check_shape("features", features, [*s.z.shape, self.num_features], "features of each row of the sample")
        sums = _sums(features.detach(), s, losses.detach(), pooled=not self.shape)
        # An expert without rows keeps what it knows, undecayed: else it would be forgotten, with nothing in its place.
        stays = 1.0 - (1.0 - self.decay) * (sums[..., :1, :1] > 0).double()
        self.moments = self.moments.to(sums.device) * stays + sums
        self._fit = None

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the next step needs."""
        return {"moments": self.moments.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from a `state_dict`.

        Args:
            state: the state of a critic with as many experts and features, and of the same shape.
        """
        check_shape("state['moments']", state["moments"], self.moments.shape, "that of this critic")
        self.moments = state["moments"].to(torch.float64, copy=True)
        self._fit = None


def _sums(features: Tensor, s: Sample, losses: Tensor, *, pooled: bool) -> Float[Tensor, "*shape k F_1 F_2"]:
    """Sums the products of (1, features) with (1, features, loss) over the rows that each expert processed."""
    z, kept, k = s.z, s.kept, s.log_q.shape[-1]
    # What was dropped may hold garbage for a loss, NaN included, and padding for features too.
    losses = torch.where(kept, losses, 0.0)
    if s.mask is not None:
        features = torch.where(s.mask.unsqueeze(-1), features, 0.0)
    if pooled:
        features, losses, z, kept = features.flatten(0, -2), losses.flatten(), z.flatten(), kept.flatten()
    columns = [torch.ones_like(losses).unsqueeze(-2), features.mT, losses.unsqueeze(-2)]
    dtype = torch.promote_types(features.dtype, losses.dtype)
    rows = torch.cat([column.to(dtype) for column in columns], -2).double()  # [..., F + 2, n]
    experts = torch.arange(k, device=z.device).unsqueeze(-1)
    processed = ((z.unsqueeze(-2) == experts) & kept.unsqueeze(-2)).double()  # [..., k, n]
    of_expert = rows[..., None, :-1, :] * processed.unsqueeze(-2)  # [..., k, F + 1, n]
    return (of_expert.flatten(-3, -2) @ rows.mT).unflatten(-2, (k, -1))


def _fit(moments: Float[Tensor, "*shape k F_1 F_2"]) -> tuple[Tensor, Tensor]:
    """Solves the normal equations for each expert: intercepts [..., k] and slopes [..., k, F]."""
    rows = moments[..., 0, 0]
    seen, safe = rows > 0, rows.clamp_min(1e-300)
    averages = moments / safe[..., None, None]
    means, mean_loss = averages[..., 1:, 0], averages[..., 0, -1]
    pooled = moments[..., 0, -1].sum(-1, keepdim=True) / rows.sum(-1, keepdim=True).clamp_min(1e-300)
    mean_loss = torch.where(seen, mean_loss, pooled)
    if means.shape[-1] == 0:
        return mean_loss, means
    # Covariances of the features with (features, loss), in units of each feature's standard deviation; one without
    # spread has slope 0.
    covariance = torch.addcmul(averages[..., 1:, 1:], means.unsqueeze(-1), averages[..., :1, 1:], value=-1.0)
    variance, mean_square = (x.diagonal(dim1=-2, dim2=-1) for x in (covariance, averages[..., 1:, 1:]))
    spread = variance > _NO_SPREAD * mean_square
    scale = torch.where(spread, variance, torch.inf).rsqrt()
    scaled = covariance * scale.unsqueeze(-1)
    correlation = scaled[..., :-1] * scale.unsqueeze(-2)
    correlation.diagonal(dim1=-2, dim2=-1).add_((_RIDGE + 1.0 / rows.clamp_min(_RIDGE)).unsqueeze(-1))
    factor = torch.linalg.cholesky_ex(correlation).L
    slopes = torch.cholesky_solve(scaled[..., -1:], factor).squeeze(-1) * scale
    return mean_loss - (slopes * means).sum(-1), slopes
