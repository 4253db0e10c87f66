# SPDX-License-Identifier: Apache-2.0
"""What could have been drawn: the second moment and the reach of an estimate, over the experts that a row did not get.

Legend: n rows (datapoints), k columns (experts).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.audit._conditions import Problem
from equipoise.audit._statistics import Tails


@dataclass(frozen=True, slots=True, eq=False)
class Subtracted:
    """What an estimate subtracts from the losses.

    Attributes:
        baseline: a number, or one for each row of each draw [..., n].
        critic: for each pair, the same in every draw [..., n, k]; its expectation is added back.
        draws: draws that one estimate averages.
    """

    baseline: float | Tensor
    critic: Tensor | None
    draws: int


def possible_tails(problem: Problem, ratio: Float[Tensor, "draws n k"], subtracted: Subtracted) -> Tails:
    """Second moment and reach of each component, over what row i could have drawn given the other rows.

    With probability q_ij' row i draws j', and adds p/q (f - b - c) (1[j = j'] - p_ij) / n to component ij of the
    router's gradient, p/q / n to component ij' of the experts'. A pair with a huge weight is too rare to turn up; its q
    shows in every draw. What a critic adds back, e, is the same in every draw: (X + e)^2 has mean
    E X^2 + 2 e (exact - e) + e^2. The mean of D draws deviates by 1/D of the variance, and one huge weight among them
    by 1/D of its reach.

    Args:
        problem: the problem.
        ratio: p/q of every pair, drawn or not.
        subtracted: baseline and critic.

    Returns:
        The tails of one estimate.
    """
    n, k = problem.logits.shape
    p = problem.logits.softmax(-1)
    advantage, added = _advantage(problem, subtracted), torch.zeros_like(p)
    if subtracted.critic is not None:
        critic = subtracted.critic.flatten(0, -3)[0]
        advantage = advantage - critic
        added = p * (critic - (p * critic).sum(-1, keepdim=True)) / n
    advantage = advantage.abs()
    score = (torch.eye(k, dtype=p.dtype) - p.unsqueeze(-2)).abs()  # [n, j', j]
    moment = torch.einsum("ij,ijl->il", (p * ratio * advantage.square()).mean(0), score.square())
    reach = ((ratio * advantage).amax(0).unsqueeze(-1) * score).amax(-2)
    moment = torch.cat([moment.flatten(), (p * ratio).mean(0).flatten()]) / n**2
    reach = torch.cat([reach.flatten(), ratio.amax(0).flatten()]) / n
    shift = torch.cat([added.flatten(), torch.zeros_like(added).flatten()])
    moment = moment + 2.0 * shift * (problem.exact - shift) + shift.square()
    if subtracted.draws == 1:
        return Tails(moment, reach + shift.abs())
    squared = problem.exact.square()
    return Tails(squared + (moment - squared) / subtracted.draws, reach / subtracted.draws + problem.exact.abs())


def _advantage(problem: Problem, subtracted: Subtracted) -> Float[Tensor, "draws n k"]:
    """Every pair's loss less the baseline of its row; [1, n, k] where that is one number."""
    baseline = subtracted.baseline
    if isinstance(baseline, Tensor) and baseline.ndim > 0:
        return problem.losses - baseline.flatten(0, -2).unsqueeze(-1)
    return problem.losses.unsqueeze(0) - baseline
