# SPDX-License-Identifier: Apache-2.0
"""Score matrices that a solver must survive, by name: from the usual case to the degenerate ones."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

PROTOTYPES = 8


def _logits(n: int, k: int, g: Generator) -> Tensor:
    return torch.randn(n, k, generator=g)


def _gumbel(n: int, k: int, g: Generator) -> Tensor:
    """Normal logits plus Gumbel noise, -log(E) with E exponential: what Gumbel-Matching solves at every step."""
    return _logits(n, k, g) - torch.empty(n, k).exponential_(generator=g).log()


def _popular(n: int, k: int, g: Generator) -> Tensor:
    return _gumbel(n, k, g) + _logits(1, k, g)


def _favourite(n: int, k: int, g: Generator) -> Tensor:
    return _gumbel(n, k, g) + 10.0 * (torch.arange(k) == 0)


def _clustered(n: int, k: int, g: Generator) -> Tensor:
    prototypes = _logits(PROTOTYPES, k, g)
    member = torch.randint(PROTOTYPES, (n,), generator=g)
    return prototypes[member] + 1e-3 * _logits(n, k, g)


def _low_rank(n: int, k: int, g: Generator, rank: int) -> Tensor:
    return _logits(n, rank, g) @ _logits(rank, k, g)


def _heavy_tails(n: int, k: int, g: Generator) -> Tensor:
    angle = torch.rand(n, k, generator=g).clamp(1e-6, 1.0 - 1e-6) - 0.5
    return torch.tan(torch.pi * angle)


def _forbidden(n: int, k: int, g: Generator) -> Tensor:
    """Row i may always take expert i mod k, so that a solution exists."""
    scores = _gumbel(n, k, g)
    barred = torch.rand(n, k, generator=g) < 0.3
    return scores.masked_fill(barred & (torch.arange(n)[:, None] % k != torch.arange(k)), -torch.inf)


FAMILIES: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "gumbel": _gumbel,
    "logits": _logits,
    "popular": _popular,
    "saturated": lambda n, k, g: torch.sigmoid(4.0 * (_logits(n, k, g) + _logits(1, k, g))),
    "favourite": _favourite,
    "clustered": _clustered,
    "identical": lambda n, k, g: _logits(1, k, g).repeat(n, 1),
    "equal": lambda n, k, g: torch.randn((), generator=g).repeat(n, k),
    "binary": lambda n, k, g: torch.randint(2, (n, k), generator=g).float(),
    "duplicates": lambda n, k, g: (4.0 * _logits(n, k, g)).round() / 4.0,
    "huge": lambda n, k, g: 1e30 * _gumbel(n, k, g),
    "tiny": lambda n, k, g: 1e-30 * _gumbel(n, k, g),
    "rank-1": lambda n, k, g: _low_rank(n, k, g, 1),
    "rank-2": lambda n, k, g: _low_rank(n, k, g, 2),
    "heavy-tails": _heavy_tails,
    "forbidden": _forbidden,
}


def draw_scores(family: str, n: int, k: int, seed: int) -> Tensor:
    """One float32 [n, k] matrix of a family; same arguments, same matrix."""
    return FAMILIES[family](n, k, torch.Generator().manual_seed(seed))
