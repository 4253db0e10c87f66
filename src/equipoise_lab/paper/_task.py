# SPDX-License-Identifier: Apache-2.0
"""The toy task of section 3: a function with a jump, two linear experts, a router that is a logistic regression.

The parameters of a run are six numbers [router weight, router bias, expert 0's and 1's weights, their biases], and
everything takes a batch of runs.

Legend: r runs (any number of batch dimensions), n rows (datapoints), 2 experts.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from equipoise.ops import largest

Models = Float[Tensor, "*r 6"]
Rows = Float[Tensor, "*#r n"]  # of each run, or of all
NUM_PARAMETERS = 6
# Seeds of a run's streams are told apart by these, so that data, start and noise are independent.
_DATA, _START = 1 << 20, 2 << 20


def target_function(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Computes y = 1[x < 0.5] (0.8 x - 0.2) + 1[x >= 0.5] (-2 x + 2), without noise.

    Example:
        >>> target_function(torch.tensor([0.0, 0.5, 1.0]))
        tensor([-0.2000,  1.0000,  0.0000])
    """
    return torch.where(x < 0.5, 0.8 * x - 0.2, -2.0 * x + 2.0)


def draw_data(seed: int, num_points: int, noise_sd: float) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Draws x ~ U(-1, 1) and y with Gaussian noise."""
    generator = torch.Generator().manual_seed(_DATA + seed)
    x = torch.rand(num_points, generator=generator) * 2 - 1
    return x, target_function(x) + noise_sd * torch.randn(num_points, generator=generator)


def minority_share(x: Float[Tensor, " n"]) -> float:
    """Computes the share of the points with x >= 0.5, the side of the jump that has a quarter of them on average."""
    return float((x >= 0.5).double().mean())


def draw_datasets(seeds: Iterable[int], num_points: int, noise_sd: float) -> tuple[Tensor, Tensor]:
    """Draws the dataset of each seed: x and y, [s, n] each."""
    pairs = [draw_data(seed, num_points, noise_sd) for seed in seeds]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def draw_parameters(seed: int, initialisation: str) -> Float[Tensor, "6"]:
    """Draws the parameters that a run starts from; see `Paper` for the initialisations."""
    generator = torch.Generator().manual_seed(_START + seed)
    if initialisation == "uniform":
        return torch.rand(NUM_PARAMETERS, generator=generator) * 2 - 1
    if initialisation == "small":
        return 0.1 * torch.randn(NUM_PARAMETERS, generator=generator)
    draws = torch.randn(64, generator=generator)
    weights = draws[draws.abs() < 2][:3]  # truncated by rejection; 64 draws hold three such with certainty enough
    zeros = torch.zeros(3)
    return torch.stack([weights[0], zeros[0], weights[1], weights[2], zeros[1], zeros[2]])


def lines(parameters: Models, x: Rows) -> tuple[Float[Tensor, "*r n"], Float[Tensor, "*r n"], Float[Tensor, "*r n"]]:
    """Computes the router's logit and the predictions of both experts, differentiably."""
    weight, bias, first, second, first_bias, second_bias = parameters.unsqueeze(-1).unbind(-2)
    return weight * x + bias, first * x + first_bias, second * x + second_bias


def router(a: Float[Tensor, "*r n"]) -> Float[Tensor, "*r n 2"]:
    """Computes log p(z | x) = log sigmoid(-a), log sigmoid(a), differentiably.

    Rows are the last dimension in memory, where operations on columns are vectorised.
    """
    second = logsigmoid(a)
    return torch.stack([second - a, second], -2).mT


@torch.no_grad()
def errors(parameters: Models, x: Rows, y: Rows, gated: Tensor) -> tuple[Float[Tensor, "*r"], Float[Tensor, "*r"]]:
    """Computes the mean squared error of the expert of largest probability, and its expectation under the router.

    Where a run is `gated`, bool [*r], predictions are multiplied by the probability of their expert.
    """
    a, first, second = lines(parameters, x)
    p, both = router(a).exp(), torch.stack([first, second], -2).mT
    squared = (y.unsqueeze(-1) - torch.where(gated[..., None, None], p * both, both)) ** 2
    best = squared.gather(-1, largest(p)[1].unsqueeze(-1)).squeeze(-1)
    return best.mean(-1), (p * squared).sum(-1).mean(-1)
