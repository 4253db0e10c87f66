# SPDX-License-Identifier: Apache-2.0
"""The residual baseline for inner layers: what a layer's input, read out as it is, says about the token's target.

Legend: l layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from equipoise._core import check_at_least, check_mask, check_shape
from equipoise.nn._router_checks import check_input_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadoutLoss:
    """What a readout found.

    Attributes:
        residual: r, the loss of each token's prediction, detached: for `Surrogate(...)(..., residual=[...])`.
        loss: the mean of the same over the tokens that count, with gradient for the readout alone: add it to the loss.
    """

    residual: Float[Tensor, "*shape"]
    loss: Float[Tensor, ""]


def cross_entropy(
    predictions: Float[Tensor, "*shape classes"], targets: Int[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Computes the cross-entropy of each token.

    Args:
        predictions: logits.
        targets: the classes.

    Returns:
        One loss for each token.
    """
    losses = F.cross_entropy(predictions.reshape(-1, predictions.shape[-1]), targets.reshape(-1), reduction="none")
    return losses.reshape(targets.shape)


class Readout(nn.Module):
    r"""A small head on the input of a layer, which predicts each token's target; trained alongside the model.

    .. math::
        r_i^l = \text{loss}(\text{head}(h_i^l), y_i), \qquad b_i^l = \alpha_l + \beta_l r_i^l

    with h_i^l the hidden state that enters layer l, detached: the model does not learn from the readout.
    `ResidualBaseline` fits alpha_l and beta_l. A readout takes one matrix product, and uses what the layers before have
    computed for the token. (The loss without experts, which `ResidualBaseline` takes otherwise, needs a second forward
    pass.)

    Unbiased for: the router of layer l, and of layers after it. h_i^l depends on the experts that layers before l
    gave the token, and on none of layer l. Given those, b_i^l is a constant in layer l's score-function term.
    **Biased for the routers of layers before l**, whose draws it depends on. So each layer has a readout of its own (or
    that of an earlier layer), and `Surrogate` a list of baselines, one for each layer. The head's parameters come from
    past batches; take its optimiser step after the surrogate has read r. With attention the same holds: what enters
    layer l was made before layer l drew for any token.

    Example:
        >>> import equipoise as eq
        >>> moe, readout = eq.nn.MoE(8, 4), Readout(8, 5)
        >>> surrogate = eq.nn.Surrogate([eq.nn.ResidualBaseline()])  # one for each layer
        >>> x, targets, head = torch.randn(16, 8), torch.randint(5, [16]), torch.nn.Linear(8, 5)
        >>> with eq.nn.capture(moe) as routings:
        ...     token_losses = torch.nn.functional.cross_entropy(head(x + moe(x)), targets, reduction="none")
        >>> r = readout(x, targets)
        >>> loss = surrogate(token_losses, routings, residual=[r.residual]) + r.loss
        >>> loss.backward()
        >>> readout.head.weight.grad.shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        dim: int,
        head: int | nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Builds the head.

        Args:
            dim: features of a token.
            head: how many numbers to predict, by one linear layer; or a module [..., dim] -> [..., anything].
            loss: from predictions and targets to one loss for each token.
            device: the device of a linear head.
            dtype: the dtype of a linear head.
        """
        super().__init__()
        check_at_least("dim", dim, 1)
        if isinstance(head, int):
            check_at_least("head", head, 1)
            head = nn.Linear(dim, head, device=device, dtype=dtype)
        self.dim, self.head, self.loss = dim, head, loss

    def forward(
        self, hidden: Float[Tensor, "*shape dim"], targets: Tensor, *, mask: Bool[Tensor, "*shape"] | None = None
    ) -> ReadoutLoss:
        """Predicts the targets.

        Args:
            hidden: what enters the layer.
            targets: as the loss takes them.
            mask: False for tokens whose loss does not count.

        Returns:
            r for each token, and the loss to add.
        """
        check_input_dim(hidden, self.dim)
        shape = hidden.shape[:-1]
        check_mask(mask, shape)
        losses = self.loss(self.head(hidden.detach()), targets)
        check_shape("loss(head(hidden), targets)", losses, shape, "one number for each token")
        losses = losses.to(torch.promote_types(losses.dtype, torch.float32))
        counted = losses if mask is None else torch.where(mask, losses, 0.0)
        rows = max(losses.numel(), 1) if mask is None else mask.sum().clamp_min(1)
        return ReadoutLoss(residual=losses.detach(), loss=counted.sum() / rows)
