# SPDX-License-Identifier: Apache-2.0
"""Baselines: what to subtract from the losses so that the score-function term varies less.

A baseline for row i may not depend on z_i. Under skip and Gumbel-Matching the other rows' experts do depend on z_i.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_fraction, check_shape
from equipoise.sampling import Sample


@torch.no_grad()
def ema_update(
    value: Float[Tensor, "..."], losses: Float[Tensor, "*batch n"], s: Sample, decay: float
) -> Float[Tensor, "..."]:
    """Moves an exponential moving average on by the plain mean of the losses over the rows that were kept.

    Args:
        value: the average so far: one number [], for the mean over all batch dimensions, or one for each problem [...].
        losses: f(x_i, z_i).
        s: the sample they belong to. Where it kept no row there is nothing to average, and the value stays.
        decay: how much of the value stays, in [0, 1).

    Returns:
        The new average, detached, of the shape of the old and at least float32.
    """
    check_shape("losses", losses, s.z.shape, "one loss a row, f(x_i, z_i)")
    if value.ndim > 0:
        check_shape("value", value, losses.shape[:-1], "one number for each problem")
    dtype = torch.promote_types(losses.dtype, torch.float32)
    rows, total = s.kept.sum(-1), torch.where(s.kept, losses, 0.0).sum(-1, dtype=dtype)
    if value.ndim == 0:
        rows, total = rows.sum(), total.sum()
    value = value.to(total)
    return torch.where(rows > 0, decay * value + (1 - decay) * (total / rows.clamp_min(1)), value)


class EMABaseline:
    r"""An exponential moving average of past losses, as a baseline for all rows of a problem.

    .. math::
        b_{t+1} = \lambda b_t + (1 - \lambda) f_t, \qquad b_0 = 0,

    with f_t the plain mean of the losses over the rows kept at step t. Read `value` first, `update` afterwards: the
    value then depends on past batches only, and subtracting it is unbiased under every way of sampling.

    Example:
        >>> import equipoise.sampling as sampling
        >>> ema = EMABaseline(decay=0.9)
        >>> log_p = torch.zeros(2, 1)
        >>> s = sampling.sample_independent(log_p, torch.zeros(2, 1))
        >>> b = ema.value  # 0 at first; pass it on as reinforce(..., baseline=b)
        >>> ema.update(torch.tensor([1.0, 3.0]), s)
        >>> ema.value
        tensor(0.2000)

    References:
        Sutton, Barto, Reinforcement learning: an introduction, 2nd edition (2018), section 13.4.
    """

    def __init__(self, decay: float = 0.99, shape: Sequence[int] = ()) -> None:
        """Starts at 0.

        Args:
            decay: lambda, in [0, 1).
            shape: () for one number, the mean over all batch dimensions; or the batch dimensions, for a number each.
        """
        check_fraction("decay", decay)
        self.decay = decay
        self.value: Tensor = torch.zeros(tuple(shape))

    def update(self, losses: Float[Tensor, "*batch n"], s: Sample) -> None:
        """Takes in the losses of a batch, after its estimate has read `value`.

        Args:
            losses: f(x_i, z_i).
            s: the sample they belong to.
        """
        self.value = ema_update(self.value, losses, s, self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the next step needs."""
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from a `state_dict`.

        Args:
            state: of a baseline of the same shape.
        """
        check_shape("state['value']", state["value"], self.value.shape, "that of this baseline")
        self.value = state["value"].clone()


@torch.no_grad()
def leave_one_out_baseline(losses: Float[Tensor, "*batch n"], s: Sample) -> Float[Tensor, "*batch n"]:
    """Averages, for each row, the losses of the other rows that were kept; 0 where there is none.

    Unbiased when: the rows were sampled independently (`sample_independent`). Under skip and Gumbel-Matching the other
    rows' experts depend on z_i, and this baseline is **biased**.

    Args:
        losses: f(x_i, z_i).
        s: the sample.

    Returns:
        [..., n], detached.

    Example:
        >>> import equipoise.sampling as sampling
        >>> s = sampling.sample_independent(torch.zeros(3, 2), torch.zeros(3, 2))
        >>> leave_one_out_baseline(torch.tensor([1.0, 2.0, 6.0]), s)
        tensor([4.0000, 3.5000, 1.5000])
    """
    check_shape("losses", losses, s.z.shape, "one loss a row, f(x_i, z_i)")
    kept_losses = torch.where(s.kept, losses, 0.0)
    others = s.kept.sum(-1, keepdim=True) - s.kept.long()
    return (kept_losses.sum(-1, keepdim=True) - kept_losses) / others.clamp_min(1)
