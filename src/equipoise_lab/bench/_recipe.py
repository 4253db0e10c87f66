# SPDX-License-Identifier: Apache-2.0
"""What the assignment benchmark runs, as a typed value, and the limits that its results are held against."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from equipoise._core import check_one_of
from equipoise_lab.bench._benchmark import check_run
from equipoise_lab.bench._families import FAMILIES

Size = tuple[int, int]
# n, k and K: experts a row.
Several = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignBench:
    """One run of the assignment benchmark.

    Attributes:
        sizes: problems n x k, in the order in which they are measured; a solver whose smaller problems show that a
            larger one would exceed the budget skips it.
        robust_size: the problem at which every family is tried.
        several: problems n x k with K experts a row.
        behaviours: names of the further checks (threads, memory, start-up, ...) to run.
        family: the family of score matrices for the sizes.
        threads: threads for torch and for us; the peers use one.
        repeats: repetitions, of which the best counts.
        seed: seed of the first score matrix.
        budget: seconds that one call may take.
    """

    sizes: tuple[Size, ...]
    robust_size: Size
    several: tuple[Several, ...]
    behaviours: tuple[str, ...]
    family: str = "popular"
    threads: int = 1
    repeats: int = 5
    seed: int = 0
    budget: float = 10.0

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        check_one_of("family", self.family, list(FAMILIES))
        check_run(self)

    @property
    def judged(self) -> bool:
        """Whether the limits apply: they are stated for experts of unequal popularity and one thread."""
        return self.family == "popular" and self.threads == 1


BEHAVIOURS = ("growth", "batch", "warm-start", "threads", "memory", "first-call", "import")

_FULL = AssignBench(
    sizes=(
        (1024, 64),
        (2048, 64),
        (4096, 16),
        (4096, 64),
        (8192, 64),
        (16384, 64),
        (32768, 64),
        (65536, 64),
        (65536, 256),
        (262144, 64),
    ),
    robust_size=(16384, 64),
    several=((16384, 64, 2), (16384, 64, 8), (65536, 128, 2), (65536, 128, 8)),
    behaviours=BEHAVIOURS,
)

RECIPES: Mapping[str, AssignBench] = {
    "full": _FULL,
    "quick": replace(
        _FULL,
        sizes=((1024, 64), (4096, 16), (4096, 64), (16384, 64)),
        several=((16384, 64, 2), (16384, 64, 8)),
        behaviours=("batch", "first-call", "import"),
        budget=2.0,
    ),
}


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """Limits at one size: at least `peer` times faster than the better peer, at most `floor` times the floor."""

    peer: float | None
    floor: float


SIZE_LIMITS: Mapping[Size, SizeLimit] = {
    (4096, 16): SizeLimit(25.0, 4.5),
    (4096, 64): SizeLimit(25.0, 4.5),
    (16384, 64): SizeLimit(100.0, 2.5),
    (65536, 64): SizeLimit(None, 2.2),
    (65536, 256): SizeLimit(None, 2.0),
}

# With K experts a row, at every size: the peer is OR-tools, the floor torch.topk.
SEVERAL_LIMIT = SizeLimit(30.0, 5.0)
# Any family, tight or with slack, in multiples of torch.argmax at the robust size.
FAMILY_LIMIT = 60.0
# An exact result has a gap of at most this, relative to the larger of |value| and the largest finite |score|.
GAP_LIMIT = 1e-9
CAPACITY_FACTOR = 1.25
