# SPDX-License-Identifier: Apache-2.0
"""Families of score matrices that a balanced assignment must survive, from the normal case to the degenerate ones.

The common thread is how many rows are exactly or nearly indifferent between experts once prices have balanced the load.

Legend: n rows (datapoints), k columns (experts).
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from equipoise._core import check_one_of

Family = Callable[[int, int, Generator], Tensor]
"""From n, k and a generator to float32 scores [n, k]."""

_PROTOTYPES = 8
_FORBIDDEN_FRACTION = 0.3


def _logits(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    return torch.randn(n, k, generator=generator)


def _gumbel(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    # -log(E) with E exponential is Gumbel; exponential_ never returns 0, so the noise is finite.
    return _logits(n, k, generator) - torch.empty(n, k).exponential_(generator=generator).log()


def _favourite(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    scores = _gumbel(n, k, generator)
    scores[:, 0] += 10.0
    return scores


def _clustered(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    prototypes = torch.randn(_PROTOTYPES, k, generator=generator)
    member = torch.randint(_PROTOTYPES, (n,), generator=generator)
    return prototypes[member] + 1e-3 * torch.randn(n, k, generator=generator)


def _low_rank(n: int, k: int, rank: int, generator: Generator) -> Float[Tensor, "n k"]:
    return torch.randn(n, rank, generator=generator) @ torch.randn(rank, k, generator=generator)


def _heavy_tails(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    # Clamped away from the poles, the largest score is about 3e5, whatever the draw.
    angle = torch.rand(n, k, generator=generator).clamp(1e-6, 1.0 - 1e-6) - 0.5
    return torch.tan(torch.pi * angle)


def _forbidden(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    scores, rows = _gumbel(n, k, generator), torch.arange(n)
    barred = torch.rand(n, k, generator=generator) < _FORBIDDEN_FRACTION
    barred[rows, rows % k] = False
    return scores.masked_fill(barred, float("-inf"))


FAMILIES: Mapping[str, Family] = {
    # Standard normal logits plus standard Gumbel noise: what Gumbel-Matching solves at every training step.
    "gumbel": _gumbel,
    # The same with a standard normal bias for each expert: some are wanted by many rows, some by few.
    "popular": lambda n, k, generator: _gumbel(n, k, generator) + torch.randn(k, generator=generator),
    # Standard normal logits without noise.
    "logits": _logits,
    # Logits of standard deviation 8: prices move far from zero.
    "sharp": lambda n, k, generator: 8.0 * _logits(n, k, generator),
    # Sigmoids of large logits, as routers that train for long give: near 1 many experts are nearly tied.
    "saturated": lambda n, k, generator: torch.sigmoid(
        3.0 * (_logits(n, k, generator) + torch.randn(k, generator=generator))
    ),
    # Every row prefers expert 0 by 10: nearly all rows have to leave the expert that they would choose.
    "favourite": _favourite,
    # Few prototypes plus noise of 1e-3: whole clusters are nearly tied between the same experts.
    "clustered": _clustered,
    # One row repeated: at the optimal prices every row is tied between all experts.
    "identical": lambda n, k, generator: _logits(1, k, generator).repeat(n, 1),
    # One number everywhere: any balanced assignment is optimal.
    "equal": lambda n, k, generator: torch.randn((), generator=generator).repeat(n, k),
    # Scores in {0, 1}: a matching problem, ties everywhere.
    "binary": lambda n, k, generator: torch.randint(2, (n, k), generator=generator).float(),
    # Normal logits rounded to quarters: exact ties between rows, between experts and between paths.
    "duplicates": lambda n, k, generator: (4.0 * _logits(n, k, generator)).round() / 4.0,
    # Magnitude 1e30: squares overflow in float32.
    "huge": lambda n, k, generator: 1e30 * _gumbel(n, k, generator),
    # Magnitude 1e-30: any absolute tolerance would call all experts tied.
    "tiny": lambda n, k, generator: 1e-30 * _gumbel(n, k, generator),
    # An outer product: rows can be sorted, and the optimum cuts the order into k runs.
    "rank-1": lambda n, k, generator: _low_rank(n, k, 1, generator),
    # Rank 2: each expert competes with two or three neighbours only, so changes travel along long paths.
    "rank-2": lambda n, k, generator: _low_rank(n, k, 2, generator),
    # Cauchy scores: a few entries are larger than the rest by many orders of magnitude.
    "heavy-tails": _heavy_tails,
    # Gumbel-perturbed logits with random pairs at -inf; row i may always take expert i mod k, so a solution exists.
    "forbidden": _forbidden,
}
"""The families by name; above each, what makes it hard."""


def draw_scores(family: str, n: int, k: int, seed: int) -> Float[Tensor, "n k"]:
    """Draws one float32 score matrix of a named family; same arguments, same matrix.

    Example:
        >>> draw_scores("duplicates", 2, 3, seed=0).shape
        torch.Size([2, 3])
    """
    check_one_of("family", family, list(FAMILIES))
    return FAMILIES[family](n, k, torch.Generator().manual_seed(seed))
