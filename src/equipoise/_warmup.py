# SPDX-License-Identifier: Apache-2.0
"""`warmup`: compile every kernel ahead of its first use."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from equipoise._core import FLOATS
from equipoise.assignment import assign, conditional_values, detour_costs
from equipoise.balancing import sinkhorn
from equipoise.ops import weigh_rows
from equipoise.sampling import sample_gumbel_matching, sample_skip

_SEED = 0
# Sizes on either side of where the solver changes its ways.
_SMALL, _LARGE = (32, 4), (16_384, 16)


def warmup(
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    *,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Compiles all kernels of the library, or loads those that were compiled before.

    Kernels are compiled when they are first needed, and kept on disk for later processes (`docs/assignment.md` says
    where). Compiling all of them takes about a minute of one core. Call this when an image is built or before a job
    starts, on a CPU of the kind that will run it; kernels for another kind are compiled anew. `equipoise warmup` does
    the same.

    It solves small problems of its own. Torch's global random stream stays as it is.

    Args:
        dtypes: what scores will be. float16 and bfloat16 need what float32 does.
        progress: called with a line of text before each group of kernels.

    Raises:
        ValueError: a dtype that scores cannot have.

    Example:
        >>> import torch, equipoise as eq
        >>> eq.warmup([torch.float32])
    """
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise ValueError(
                f"dtypes must be float16, bfloat16, float32 or float64, got {dtype}: leave out what scores cannot be"
            )
    for dtype in dict.fromkeys(torch.float64 if dtype == torch.float64 else torch.float32 for dtype in dtypes):
        for title, work in _groups(dtype):
            if progress is not None:
                progress(f"{title}, {str(dtype).removeprefix('torch.')}")
            work()


def _groups(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    generator = torch.Generator().manual_seed(_SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    small, large = normal(*_SMALL), normal(*_LARGE)
    pair = normal(64, 2)
    yield "two experts", lambda: (assign(pair), sinkhorn(pair), _sample_pairs(pair, normal(64, 2)))
    yield "small problems", lambda: assign(small)
    yield "large problems", lambda: _cold_and_warm(large)
    yield "hard problems", lambda: [_cold_and_warm(scores) for scores in _hard(normal)]
    yield "problems without a solution", lambda: _without_room(large)
    yield "conditional values", lambda: _conditionals(small)
    yield "sampling", lambda: sample_gumbel_matching(small, normal(*_SMALL))


def _sample_pairs(logits: Tensor, noise: Tensor) -> None:
    s = sample_skip(logits, noise, noise[:, 0])
    sample_gumbel_matching(logits, noise)
    chosen = s.at_z(logits.clone().requires_grad_())
    chosen.sum().backward()
    weigh_rows(s.keep_weight, s.kept, chosen, chosen)


def _cold_and_warm(scores: Tensor) -> None:
    slack = 2 * scores.shape[0] // scores.shape[1]
    first = assign(scores)
    assign(scores, prices=first.prices)
    assign(scores, slack)
    assign(scores, top_k=2)


def _hard(normal: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Scores that lead through the rare parts of the solver."""
    n, k = _LARGE
    yield normal(1, k).repeat(n, 1)  # identical rows
    yield normal(8, k).repeat(n // 8, 1) + 1e-3 * normal(n, k)  # clusters
    yield normal(n, 1) * normal(1, k)  # rank one
    yield 1e37 * normal(n, k)
    forbidden = normal(n, k)
    forbidden[: n // 2, : k // 2] = -torch.inf
    yield forbidden


def _without_room(scores: Tensor) -> None:
    """The solver does everything it can before it says so."""
    few = scores.clone()
    few[:, few.shape[1] // 2 :] = -torch.inf
    with suppress(ValueError):
        assign(few)


def _conditionals(scores: Tensor) -> None:
    a = assign(scores)
    conditional_values(scores, a)
    detour_costs(scores, a)
