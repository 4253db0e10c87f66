# SPDX-License-Identifier: Apache-2.0
"""Critics as the surrogate reads them: a predicted loss for each row and expert, in one layer or in each.

Legend: T rows (tokens), E experts, l layers.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.estimators import expected_critic
from equipoise.nn._capture import Emission
from equipoise.nn._surrogate_checks import check_critic_graph, check_critic_layer

Critics = Sequence[Float[Tensor, "T E"] | None]
"""c^l for each layer, None where there is none; with gradient where a surrogate is to fit it."""


def read_drawn(critics: Critics, emissions: Sequence[Emission]) -> list[Float[Tensor, " T"] | None]:
    """Reads each critic at the experts that its layer drew.

    Args:
        critics: one for each layer.
        emissions: the records of the layers.

    Returns:
        c_{i z_i} of each layer, with the gradient of c.
    """
    drawn: list[Tensor | None] = []
    for critic, emission in zip(critics, emissions, strict=True):
        layer = emission.routing
        if critic is not None:
            check_critic_layer(len(layer.samples), layer.score_function)
        drawn.append(None if critic is None else layer.samples[0].at_z(critic))
    return drawn


def add_back(
    critics: Critics,
    emissions: Sequence[Emission],
    counted: Bool[Tensor, " T"] | None,
    *,
    product: bool,
    differentiable: bool,
) -> Tensor | float:
    r"""Computes what subtracting the critics takes away in expectation: 0, with the gradient of sum_ij p_ij c_ij.

    In layer l the score function of c_{i z_i} has the expectation :math:`\nabla \sum_j p_{ij} c_{ij}`, given what the
    layers before it drew. Where terms carry the product of all layers' weights, those of layers after l are 1 in
    expectation, and those of layers before l multiply the term.

    Args:
        critics: one for each layer.
        emissions: the records of the layers.
        counted: rows that count; None for all of them.
        product: whether terms carry the product of all layers' weights.
        differentiable: whether the losses have a graph, so that there is something to add to.

    Returns:
        The sum over rows and layers.
    """
    total: Tensor | float = 0.0
    before: Tensor | float = 1.0
    for critic, emission in zip(critics, emissions, strict=True):
        layer = emission.routing
        if critic is not None:
            check_critic_graph(emission.grad_enabled or not differentiable)
            c = critic.detach().to(layer.log_p.dtype)
            total = total + (before * expected_critic(layer.score_log_p, c, counted)).sum()
        if product:
            before = before * layer.weight
    return total


def fit_critics(
    drawn: Sequence[Float[Tensor, " T"] | None],
    losses: Float[Tensor, " T"],
    baselines: Sequence[Tensor | float],
    active: Bool[Tensor, " T"],
    emissions: Sequence[Emission],
) -> Float[Tensor, ""]:
    """Computes the squared error of critics that learn what a baseline leaves of the loss, on rows with an expert.

    Args:
        drawn: from `read_drawn`, with gradient.
        losses: f, detached.
        baselines: b of each layer.
        active: rows that have a term.
        emissions: the records of the layers.

    Returns:
        The sum over layers of the mean over rows, with gradient for the critics alone.
    """
    total = torch.zeros((), dtype=losses.dtype, device=losses.device)
    for c, b, emission in zip(drawn, baselines, emissions, strict=True):
        if c is not None:
            rows = active & emission.routing.kept
            error = torch.where(rows, losses - b - c, 0.0)
            total = total + error.square().sum() / rows.sum().clamp_min(1)
    return total
