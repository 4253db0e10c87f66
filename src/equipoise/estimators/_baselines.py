# SPDX-License-Identifier: Apache-2.0
"""Baselines: what to subtract from the losses so that the score-function term varies less.

A baseline for row i may not depend on z_i. Under skip and Gumbel-Matching the other rows' experts do depend on z_i, so
a mean over the batch is biased there. `reinforce` cannot see how a baseline was computed: use the functions of this
file, which know the sample, or statistics of past batches.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._core import all_finite, check_fraction, check_shape, compact_repr, reads_values
from equipoise.estimators._checks import check_rows_independent, check_several_draws
from equipoise.sampling import THIS_PROCESS, Sample, Scope

# Keeps 0 / 0 from being NaN where nothing was kept.
_TINY = 1e-30


@torch.no_grad()
def ema_update(
    value: Float[Tensor, "..."],
    losses: Float[Tensor, "*batch n"],
    kept: Sample | Bool[Tensor, "*batch n"],
    decay: float | Float[Tensor, "..."],
    scope: Scope = THIS_PROCESS,
) -> Float[Tensor, "..."]:
    """Updates an exponential moving average with the plain mean of the losses of the rows that were kept.

    Args:
        value: the average so far: one number [], for the mean over all batch dimensions, or one for each problem [...].
        losses: f(x_i, z_i).
        kept: rows to average over, or the sample that kept them. Rows whose loss is not finite are left out, so that
            one bad batch does not stay in the average. If no row is left, the value stays.
        decay: the weight of the old value, in [0, 1); one number, or one for each entry of the value.
        scope: of the rows: the mean is over those of all ranks.

    Returns:
        The new average, detached, of the shape of the old and at least float32.

    Example:
        >>> ema_update(torch.tensor(1.0), torch.tensor([2.0, 4.0]), torch.tensor([True, True]), decay=0.5)
        tensor(2.)
    """
    kept = _countable(losses, kept)
    if value.ndim > 0:
        check_shape("value", value, losses.shape[:-1], "one number for each problem")
    dtype = torch.promote_types(losses.dtype, torch.float32)
    rows, total = kept.sum(-1), _sum_kept(losses, kept, dtype)
    if value.ndim == 0:
        rows, total = rows.sum(), total.sum()
    rows, total = scope.everywhere(rows), scope.everywhere(total)
    value = value.to(total)
    decay = decay.to(total) if isinstance(decay, Tensor) else decay
    return torch.where(rows > 0, decay * value + (1 - decay) * (total / rows.clamp_min(1)), value)


def _countable(losses: Tensor, kept: Sample | Tensor) -> Tensor:
    """Returns the rows that were kept and have a finite loss, without waiting for the device."""
    kept = kept.kept if isinstance(kept, Sample) else kept
    check_shape("losses", losses, kept.shape, "one loss a row, f(x_i, z_i)")
    return kept & losses.isfinite()


def _sum_kept(losses: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds up the losses of the rows that were kept, whatever the others hold."""
    if reads_values(losses, kept):
        total = (losses * kept).sum(-1, dtype=dtype)  # faster than choosing, and the same if all losses are finite
        if all_finite(total):
            return total
    return torch.where(kept, losses, 0.0).sum(-1, dtype=dtype)


class EMABaseline:
    r"""An exponential moving average of past losses, as a baseline for all rows of a problem.

    .. math::
        b_t = \frac{\sum_{s < t} \lambda^{t-1-s} f_s}{\sum_{s < t} \lambda^{t-1-s}}, \qquad b_0 = \text{start},

    with f_s the plain mean of the losses over the rows kept at step s. From the second step on this is a weighted
    average of past losses alone, corrected for the start as Adam corrects its moments. With `corrected=False` it is the
    paper's, :math:`b_{t+1} = \lambda b_t + (1 - \lambda) f_t`, which depends on its start for about 1 / (1 - lambda)
    steps. From a start of 0, b is too small during these steps, and the score-function term is many times too large.

    Unbiased when: it is read before it is updated with the same batch. The value then depends on past batches only, and
    subtracting it is unbiased under every way of sampling.

    Example:
        >>> import equipoise.sampling as sampling
        >>> ema = EMABaseline(decay=0.9)
        >>> log_p = torch.zeros(2, 1)
        >>> s = sampling.sample_independent(log_p, torch.zeros(2, 1))
        >>> b = ema.value  # 0 at first; pass it on as reinforce(..., baseline=b)
        >>> ema.update(torch.tensor([1.0, 3.0]), s)
        >>> ema.value
        tensor(2.)

    References:
        Sutton, Barto, Reinforcement learning: an introduction, 2nd edition (2018), section 13.4.
        Kingma, Ba, Adam: a method for stochastic optimization (2015), section 3.
    """

    def __init__(
        self, decay: float = 0.99, shape: Sequence[int] = (), *, start: float = 0.0, corrected: bool = True
    ) -> None:
        """Sets up the average.

        Args:
            decay: lambda, in [0, 1).
            shape: () for one number, the mean over all batch dimensions; or the batch dimensions, for a number each.
            start: b before the first batch. The loss of an untrained model, such as log(classes), makes the first step
                as large as those that follow.
            corrected: whether the start has weight 0 from the first batch on.
        """
        check_fraction("decay", decay)
        self.decay, self.corrected = decay, corrected
        self.value: Tensor = torch.full(tuple(shape), float(start))
        # The sum of the decaying weights of past batches, 1 - lambda^t; the paper's acts as if it were 1 all along.
        self._seen: Tensor = torch.full(tuple(shape), 0.0 if corrected else 1.0, dtype=torch.float64)

    def __repr__(self) -> str:
        """Shows the settings, and the average."""
        return compact_repr(self, decay=self.decay, value=self.value)

    @torch.no_grad()
    def update(
        self,
        losses: Float[Tensor, "*batch n"],
        kept: Sample | Bool[Tensor, "*batch n"],
        scope: Scope = THIS_PROCESS,
    ) -> None:
        """Takes in the losses of a batch, after its estimate has read `value`.

        Args:
            losses: f(x_i, z_i).
            kept: rows to average over, or the sample that kept them. Rows whose loss is not finite are left out.
            scope: of the rows: the mean is over those of all ranks.
        """
        if not self.corrected:
            self.value = ema_update(self.value, losses, kept, self.decay, scope)
            return
        seen = self._seen.to(losses.device)
        moved = self.decay * seen + (1 - self.decay)
        self.value = ema_update(self.value, losses, kept, self.decay * seen / moved, scope)
        rows = _countable(losses, kept)
        count = scope.everywhere(rows.sum() if seen.ndim == 0 else rows.sum(-1))
        self._seen = torch.where(count > 0, moved, seen)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the next step needs."""
        return {"value": self.value.clone(), "seen": self._seen.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from a `state_dict`.

        Args:
            state: the state of a baseline of the same shape. A state of version 0.1 has no "seen"; it counts as one
                after many batches.
        """
        check_shape("state['value']", state["value"], self.value.shape, "that of this baseline")
        self.value = state["value"].clone()
        self._seen = state["seen"].clone() if "seen" in state else torch.ones_like(self._seen)


@torch.no_grad()
def leave_one_out_baseline(
    losses: Float[Tensor, "*batch n"], s: Sample, *, allow_biased: bool = False
) -> Float[Tensor, "*batch n"]:
    """Averages, for each row, the losses of the other rows of its batch that were kept; 0 where there is none.

    Unbiased when: the rows were sampled independently (`sample_independent`). Under skip and Gumbel-Matching the other
    rows' experts depend on z_i, and this baseline is **biased**. The function refuses it there, unless `allow_biased`
    is set. Use `draws_baseline` over independent draws, or a statistic of past batches.

    Args:
        losses: f(x_i, z_i).
        s: the sample.
        allow_biased: compute it even where it is biased, for experiments that show the bias.

    Returns:
        [..., n], detached.

    Example:
        >>> import equipoise.sampling as sampling
        >>> s = sampling.sample_independent(torch.zeros(3, 2), torch.zeros(3, 2))
        >>> leave_one_out_baseline(torch.tensor([1.0, 2.0, 6.0]), s)
        tensor([4.0000, 3.5000, 1.5000])
    """
    check_shape("losses", losses, s.z.shape, "one loss a row, f(x_i, z_i)")
    if not allow_biased:
        check_rows_independent(s.respects_capacity, s.assigns_all)
    kept_losses = torch.where(s.kept, losses, 0.0)
    others = s.kept.sum(-1, keepdim=True) - s.kept.long()
    return (kept_losses.sum(-1, keepdim=True) - kept_losses) / others.clamp_min(1)


@torch.no_grad()
def draws_baseline(
    losses: Float[Tensor, "draws *batch n"],
    s: Sample,
    *,
    weight: Float[Tensor, "draws *batch n"] | None = None,
) -> Float[Tensor, "draws *batch n"]:
    r"""Averages, for each row and draw, the losses of the same row in the other draws.

    .. math::
        b_i^d = \frac{\sum_{d' \ne d} v_i^{d'} f_i^{d'}}{\sum_{d' \ne d} v_i^{d'}},

    over D independent draws of the whole batch, with v = 1 for a row that was kept in that draw and 0 for one that was
    not, or v its weight. Where a row was kept in no other draw, the average is over all rows of the other draws. The
    estimate is the mean of `reinforce` over the draws. It evaluates the experts D times.

    Unbiased when: the draws are independent, each with noise of its own. Then b_i^d does not depend on draw d at all,
    so it may use every row of the others, under skip and Gumbel-Matching too.

    Args:
        losses: f(x_i, z_i) of D >= 2 draws, which are the first dimension.
        s: the sample of all draws, from noise of that shape.
        weight: the weight of each row in the estimate. The average is then that of the router's loss, not of the
            proposal's. None: equal weights.

    Returns:
        [D, ..., n], detached.

    Example:
        >>> import equipoise.sampling as sampling
        >>> s = sampling.sample_independent(torch.zeros(3, 1, 2), torch.zeros(3, 1, 2))  # D = 3, n = 1
        >>> draws_baseline(torch.tensor([[1.0], [2.0], [6.0]]), s).flatten()
        tensor([4.0000, 3.5000, 1.5000])

    References:
        Kool, van Hoof, Welling, Buy 4 REINFORCE samples, get a baseline for free! (2019).
    """
    check_shape("losses", losses, s.z.shape, "one loss a row, f(x_i, z_i), of each draw")
    check_several_draws(losses.shape[0] if losses.ndim > 1 else 1)
    if weight is not None:
        check_shape("weight", weight, s.z.shape, "one weight a row, of each draw")
    dtype = torch.promote_types(losses.dtype, torch.float32)
    mass = s.kept.to(dtype) if weight is None else torch.where(s.kept, weight.to(dtype), 0.0)
    total = torch.where(mass != 0, mass * losses, 0.0)
    others, others_total = (_without_own_draw(x) for x in (mass, total))
    pooled = others_total.sum(-1, keepdim=True) / others.sum(-1, keepdim=True).clamp_min(_TINY)
    return torch.where(others > 0, others_total / others.clamp_min(_TINY), pooled)


def _without_own_draw(x: Float[Tensor, "draws *rest"]) -> Float[Tensor, "draws *rest"]:
    """Sums over the other draws, without subtracting: a difference would leave rounding where the rest is 0."""
    before = x.cumsum(0).roll(1, 0)
    after = x.flip(0).cumsum(0).flip(0).roll(-1, 0)
    before[0], after[-1] = 0.0, 0.0
    return before + after
