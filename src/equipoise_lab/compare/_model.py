# SPDX-License-Identifier: Apache-2.0
"""One mixture-of-experts layer as a classifier, many runs of it at once.

The parameters of every run are those that `equipoise.nn.MoE` starts from, and a step has the gradient that `MoE` and
`Surrogate` give (the tests compare them). What differs is the batch dimension: a layer this small spends its time on
calls, so that runs that are trained together cost little more than one. All experts see all rows, and what was not
asked for is not looked at.

Legend: r runs, n rows, d features, k experts, h hidden units of an expert, C classes.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.nn import MLPExperts, MoE
from equipoise.ops import count_groups, log_softmax, rank_within_groups


class MixtureBatch(nn.Module):
    """Mixtures of k experts d -> h -> C with a linear router each, one for each seed that is given.

    Args:
        seeds: of the parameters of each run; equal seeds give equal parameters.
        dim: d.
        num_experts: k.
        hidden_dim: h.
        num_classes: C, at most d.

    Example:
        >>> log_p, outputs = MixtureBatch([0, 1, 1], 6, 4, 2, 3)(torch.randn(3, 5, 6))
        >>> log_p.shape, outputs.shape
        (torch.Size([3, 5, 4]), torch.Size([3, 4, 5, 3]))
    """

    def __init__(self, seeds: Sequence[int], dim: int, num_experts: int, hidden_dim: int, num_classes: int) -> None:
        super().__init__()
        layers = {seed: start_layer(seed, dim, num_experts, hidden_dim) for seed in set(seeds)}
        own = [_parameters(layers[seed], num_classes) for seed in seeds]
        gate, up, up_bias, down, down_bias = (torch.stack(list(parts)).detach() for parts in zip(*own, strict=True))
        self.gate = nn.Parameter(gate)
        # All hidden units of a run in one matrix, for one product.
        self.up, self.up_bias = nn.Parameter(up.flatten(1, 2)), nn.Parameter(up_bias.flatten(1, 2).unsqueeze(1))
        self.down, self.down_bias = nn.Parameter(down), nn.Parameter(down_bias.unsqueeze(2))

    def forward(self, x: Float[Tensor, "r n d"]) -> tuple[Float[Tensor, "r n k"], Float[Tensor, "r k n C"]]:
        """Computes the router's log-probabilities, and what every expert says of every row.

        Args:
            x: the rows of each run.

        Returns:
            log_p, and the class scores.
        """
        hidden = F.gelu(torch.baddbmm(self.up_bias, x, self.up.mT))
        by_expert = hidden.unflatten(2, (self.down.shape[1], -1)).transpose(1, 2)
        return log_softmax(torch.bmm(x, self.gate.mT)), by_expert @ self.down.mT + self.down_bias


def start_layer(seed: int, dim: int, num_experts: int, hidden_dim: int, **options: object) -> MoE:
    """Builds the layer that runs of a seed start from.

    Args:
        seed: of the parameters.
        dim: d.
        num_experts: k.
        hidden_dim: h.
        options: of `MoE`.

    Returns:
        The layer: its first C outputs are the class scores, so that its experts are d -> h -> C.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoE(dim, num_experts, hidden_dim=hidden_dim, **options)  # pyright: ignore[reportArgumentType]


def _parameters(layer: MoE, num_classes: int) -> tuple[Tensor, ...]:
    """Takes the gate and the experts' parameters out of a layer, without the outputs that nobody reads."""
    experts = layer.experts
    assert isinstance(experts, MLPExperts)
    assert experts.up_bias is not None
    assert experts.down_bias is not None
    down, down_bias = experts.down[:, :num_classes], experts.down_bias[:, :num_classes]
    return layer.router.weight, experts.up, experts.up_bias, down, down_bias


def at_expert(outputs: Float[Tensor, "r k n C"], z: Int[Tensor, "r n"]) -> Float[Tensor, "r n C"]:
    """Gathers what the chosen expert of each row says.

    Args:
        outputs: of all experts.
        z: the expert of each row.

    Returns:
        The class scores, with gradient for the chosen experts alone.
    """
    index = z[:, None, :, None].expand(-1, 1, -1, outputs.shape[-1])
    return outputs.gather(1, index).squeeze(1)


def within_capacity(z: Int[Tensor, "r n"], num_experts: int, capacity: Int[Tensor, "r"] | int) -> Tensor:
    """Finds the rows that are among the first `capacity` of their expert, by position, as `MoE` drops the others.

    Args:
        z: the expert of each row.
        num_experts: k.
        capacity: rows that an expert may take, the same in all runs or one for each.

    Returns:
        bool [r, n].
    """
    limit = torch.as_tensor(capacity).reshape(-1, 1)
    rank = rank_within_groups(z, torch.zeros(z.shape), count_groups(z, num_experts))
    return rank < limit


def row_losses(scores: Float[Tensor, "... C"], y: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Computes the cross-entropy of each row, in nats.

    Args:
        scores: the class scores.
        y: the labels.
    """
    return F.cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="none").reshape(y.shape)
