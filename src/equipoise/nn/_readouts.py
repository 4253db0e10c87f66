# SPDX-License-Identifier: Apache-2.0
"""A readout and a baseline for every layer of a model, which `Surrogate` reads and trains.

Legend: l layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from equipoise.nn._capture import Emission, RoutingSource
from equipoise.nn._readout import Readout, cross_entropy
from equipoise.nn._residual_baseline import ResidualBaseline
from equipoise.nn._routings import Routings
from equipoise.nn._surrogate_checks import check_has_layers, check_inputs, check_readouts


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadOut:
    """What the readouts found, a list entry for each record of the capture.

    Attributes:
        pairs: its baseline and its residual.
        critics: its critic, [T, E], with gradient for the critic's parameters; None where there is none.
        loss: the sum of the readouts' losses, with gradient for the heads.
    """

    pairs: list[tuple[float | ResidualBaseline, Tensor | None]]
    critics: list[Float[Tensor, "T E"] | None]
    loss: Float[Tensor, ""]


class Readouts(nn.Module):
    r"""The baseline for models of several layers: `Surrogate(Readouts(model, classes))`.

    Each layer l that learns by the score function has a `Readout` on what enters it, and a `ResidualBaseline` on the
    readout's loss r_i^l: b_i^l = alpha_l + beta_l r_i^l. What enters layer l depends on the draws of the layers before
    it and on none of its own, so b_i^l is unbiased for layer l. `Surrogate` adds the gradient of the readouts' losses
    to what it returns, and not their value; this gradient reaches the heads alone. Three things are needed in the
    training loop: pass the targets to the surrogate, keep the layers' inputs (`capture(model, inputs=True)`), and give
    the heads' parameters to the optimiser (`parameter_groups(model, lr, surrogate=surrogate)`).

    With `critic=True` the baseline of a layer also differs by expert: b_i^l + c_ij^l, with c^l a linear function of
    what enters the layer, fitted to what b leaves of the loss at the experts drawn. `Surrogate` subtracts c at the
    expert drawn and adds back the exact gradient of its expectation under the router, so that the estimate stays
    unbiased, at any number of layers, for routers that draw one expert a token. It can help where experts differ in
    ways that a layer's input predicts; in the language model that was tried it made no difference.

    Example:
        >>> import equipoise as eq
        >>> model = torch.nn.Sequential(eq.nn.MoE(8, 4), torch.nn.Linear(8, 5))
        >>> surrogate = eq.nn.Surrogate(eq.nn.Readouts(model, 5))
        >>> optimizer = torch.optim.AdamW(eq.nn.parameter_groups(model, lr=1e-3, surrogate=surrogate))
        >>> x, targets = torch.randn(16, 8), torch.randint(5, [16])
        >>> with eq.nn.capture(model, optimizer, inputs=True) as routings:
        ...     losses = torch.nn.functional.cross_entropy(model(x), targets, reduction="none")
        >>> surrogate(losses, routings, targets=targets).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        head: int | Callable[[int], nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        *,
        critic: bool = False,
        decay: float = 0.99,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Builds a readout for each layer of a model.

        Args:
            model: the one that will be captured.
            head: how many numbers to predict, by one linear layer; or a function from a layer's dim to a module.
            loss: from predictions and targets to one loss for each token.
            critic: whether each layer has a critic, which starts at 0; for credit "token".
            decay: the decay of each `ResidualBaseline`.
            device: the device of linear heads and critics.
            dtype: the dtype of linear heads and critics.
        """
        super().__init__()
        sources: list[Any] = [module for module in model.modules() if isinstance(module, RoutingSource)]
        check_has_layers("model", model, len(sources))
        heads = [head if isinstance(head, int) else head(source.dim) for source in sources]
        self.readouts = nn.ModuleList(
            Readout(source.dim, each, loss, device=device, dtype=dtype)
            for source, each in zip(sources, heads, strict=True)
        )
        self.baselines = nn.ModuleList(ResidualBaseline(decay) for _ in sources)
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.critics = nn.ModuleList(nn.Linear(s.dim, s.num_experts, **how) for s in sources if critic)
        for parameter in self.critics.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        routings: Routings,
        emissions: Sequence[Emission],
        targets: Tensor | None,
        shape: Sequence[int],
        counted: Bool[Tensor, " T"] | None,
    ) -> ReadOut:
        """Reads every layer that learns by the score function.

        Args:
            routings: what `capture` yielded.
            emissions: its records.
            targets: as the loss takes them.
            shape: of the token losses.
            counted: rows that count; None for all of them.

        Returns:
            For each record its baseline, its residual and its critic, and the sum of the readouts' losses.
        """
        check_readouts(len(self.readouts), routings.num_layers, targets is not None)
        pairs: list[tuple[float | ResidualBaseline, Tensor | None]] = []
        critics: list[Tensor | None] = []
        total = torch.zeros((), device=emissions[0].routing.logits.device)
        mask = None if counted is None else counted.reshape(*shape)
        for number, emission in zip(routings.numbers, emissions, strict=True):
            if not emission.routing.score_function:
                pairs.append((0.0, None))
                critics.append(None)
                continue
            check_inputs(emission.inputs is not None)
            assert emission.inputs is not None
            hidden = emission.inputs.reshape(*shape, emission.inputs.shape[-1])
            found = self.readouts[number](hidden, targets, mask=mask)
            baseline = self.baselines[number]
            assert isinstance(baseline, ResidualBaseline)
            pairs.append((baseline, found.residual))
            critics.append(self.critics[number](hidden).flatten(0, -2) if self.critics else None)
            total = total + found.loss
        return ReadOut(pairs=pairs, critics=critics, loss=total)
