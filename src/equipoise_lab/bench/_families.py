# SPDX-License-Identifier: Apache-2.0
"""Families of score matrices that a balanced assignment must survive, from the normal case to the degenerate ones.

Each family is a function `(n, k, generator) -> float32 [n, k]`. What makes one hard is said where it is defined; the
common thread is how many rows are exactly or nearly indifferent between experts once prices have balanced the load.

Legend: n rows (datapoints), k columns (experts).
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from equipoise._core import check_one_of

Family = Callable[[int, int, Generator], Tensor]

_PROTOTYPES = 8
_FORBIDDEN_FRACTION = 0.3


def _gumbel(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Standard normal logits plus standard Gumbel noise: what Gumbel-Matching solves at every training step."""
    # -log(E) with E exponential is Gumbel; exponential_ never returns 0, so the noise is finite.
    return _logits(n, k, generator) - torch.empty(n, k).exponential_(generator=generator).log()


def _popular(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """The same with a standard normal bias for each expert: some are wanted by many rows, some by few."""
    return _gumbel(n, k, generator) + torch.randn(k, generator=generator)


def _logits(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Standard normal logits without noise."""
    return torch.randn(n, k, generator=generator)


def _sharp(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Logits of standard deviation 8: prices move far from zero."""
    return 8.0 * _logits(n, k, generator)


def _favourite(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Every row prefers expert 0 by 10: nearly all rows have to leave the expert that they would choose."""
    scores = _gumbel(n, k, generator)
    scores[:, 0] += 10.0
    return scores


def _clustered(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Few prototypes plus noise of 1e-3: whole clusters are nearly tied between the same experts."""
    prototypes = torch.randn(_PROTOTYPES, k, generator=generator)
    member = torch.randint(_PROTOTYPES, (n,), generator=generator)
    return prototypes[member] + 1e-3 * torch.randn(n, k, generator=generator)


def _identical(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """One row repeated: at the optimal prices every row is tied between all experts."""
    return torch.randn(1, k, generator=generator).repeat(n, 1)


def _equal(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """One number everywhere: any balanced assignment is optimal."""
    return torch.randn((), generator=generator).repeat(n, k)


def _binary(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Scores in {0, 1}: a matching problem, ties everywhere."""
    return torch.randint(2, (n, k), generator=generator).float()


def _duplicates(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Normal logits rounded to quarters: exact ties between rows, between experts and between paths."""
    return (4.0 * _logits(n, k, generator)).round() / 4.0


def _huge(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Magnitude 1e30: squares overflow in float32."""
    return 1e30 * _gumbel(n, k, generator)


def _tiny(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Magnitude 1e-30: any absolute tolerance would call all experts tied."""
    return 1e-30 * _gumbel(n, k, generator)


def _rank_one(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """An outer product: rows can be sorted, and the optimum cuts the order into k runs."""
    return _low_rank(n, k, 1, generator)


def _rank_two(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Rank 2: each expert competes with two or three neighbours only, so changes travel along long paths."""
    return _low_rank(n, k, 2, generator)


def _low_rank(n: int, k: int, rank: int, generator: Generator) -> Float[Tensor, "n k"]:
    return torch.randn(n, rank, generator=generator) @ torch.randn(rank, k, generator=generator)


def _heavy_tails(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Cauchy scores: a few entries are larger than the rest by many orders of magnitude."""
    # Clamped away from the poles, the largest score is about 3e5, whatever the draw.
    angle = torch.rand(n, k, generator=generator).clamp(1e-6, 1.0 - 1e-6) - 0.5
    return torch.tan(torch.pi * angle)


def _forbidden(n: int, k: int, generator: Generator) -> Float[Tensor, "n k"]:
    """Gumbel-perturbed logits with random pairs at -inf; row i may always take expert i mod k, so a solution exists."""
    scores = _gumbel(n, k, generator)
    barred = torch.rand(n, k, generator=generator) < _FORBIDDEN_FRACTION
    rows = torch.arange(n)
    barred[rows, rows % k] = False
    return scores.masked_fill(barred, float("-inf"))


FAMILIES: Mapping[str, Family] = {
    "gumbel": _gumbel,
    "popular": _popular,
    "logits": _logits,
    "sharp": _sharp,
    "favourite": _favourite,
    "clustered": _clustered,
    "identical": _identical,
    "equal": _equal,
    "binary": _binary,
    "duplicates": _duplicates,
    "huge": _huge,
    "tiny": _tiny,
    "rank-1": _rank_one,
    "rank-2": _rank_two,
    "heavy-tails": _heavy_tails,
    "forbidden": _forbidden,
}


def draw_scores(family: str, n: int, k: int, seed: int) -> Float[Tensor, "n k"]:
    """Draws one score matrix of a named family; same arguments, same matrix.

    Args:
        family: a name in `FAMILIES`.
        n: rows.
        k: experts.
        seed: seed of the generator that draws it.

    Returns:
        float32 scores.

    Example:
        >>> draw_scores("duplicates", 2, 3, seed=0).shape
        torch.Size([2, 3])
    """
    check_one_of("family", family, list(FAMILIES))
    return FAMILIES[family](n, k, torch.Generator().manual_seed(seed))
