# SPDX-License-Identifier: Apache-2.0
"""Same input, same output: for any number of threads, from several of them, after a fork, without a cache."""

import itertools
import multiprocessing
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise._core import _threads
from equipoise.assignment._kernels import _smoothing
from support.families import draw_scores
from support.methods import METHODS

FIELDS = ("z", "counts", "value", "prices", "gap")
# More rows than one block of the parallel passes, so that threads share a problem; ties, so that order would show.
LARGE = {family: draw_scores(family, 20_000, 16, seed=1) for family in ("gumbel", "duplicates", "clustered")}
BATCHES = {
    "small": torch.stack([draw_scores("duplicates", 100, 4, seed=seed) for seed in range(400)]),
    "medium": torch.stack([draw_scores("gumbel", 1000, 12, seed=seed) for seed in range(5)]),
}
PROBLEMS = {**LARGE, **BATCHES}


def fields(a: eq.Assignment) -> list[torch.Tensor]:
    return [getattr(a, field) for field in FIELDS]


def check_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for field, x, y in zip(FIELDS, a, b, strict=True):
        assert torch.equal(x, y), field


@pytest.mark.parametrize("slack", [0, 200])
@pytest.mark.parametrize("name", PROBLEMS)
def test_number_of_threads_does_not_matter(name: str, slack: int) -> None:
    scores = PROBLEMS[name]
    capacity = -(-scores.shape[-2] // scores.shape[-1]) + slack
    results = []
    for threads in (1, 2, 4, 1):
        torch.set_num_threads(threads)
        results.append(fields(eq.assign(scores, capacity)))
    for result in results[1:]:
        check_same(results[0], result)


@pytest.mark.parametrize("method", METHODS)
def test_repeated_calls_agree(method: str) -> None:
    scores = draw_scores("duplicates", 400, 8, seed=2)
    torch.set_num_threads(2)
    first = fields(eq.assign(scores, 60, method=method))
    for _ in range(3):
        check_same(first, fields(eq.assign(scores, 60, method=method)))


@pytest.mark.parametrize("threads", [1, 4])
def test_several_callers_at_once(threads: int) -> None:
    torch.set_num_threads(threads)
    work = [PROBLEMS[name] for name in ("gumbel", "small", "clustered", "medium", "duplicates", "small")] * 2
    expected = [fields(eq.assign(scores)) for scores in work]
    with ThreadPoolExecutor(8) as callers:
        for alone, together in zip(expected, callers.map(lambda s: fields(eq.assign(s)), work), strict=True):
            check_same(alone, together)


def test_an_error_in_one_block_reaches_the_caller() -> None:
    torch.set_num_threads(4)
    scores = LARGE["gumbel"].clone()
    scores[19_000, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN in row 19000"):
        eq.assign(scores)
    batch = BATCHES["medium"].clone()
    batch[4, 7, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN in row 7 of problem 4"):
        eq.assign(batch)


def solve_in_child(name: str) -> list[np.ndarray]:
    torch.set_num_threads(2)
    return [x.numpy() for x in fields(eq.assign(PROBLEMS[name]))]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_after_a_fork() -> None:
    torch.set_num_threads(2)
    torch.ones(10**6).sum()  # from here on torch's own threads are lost in a child, and waiting for them has no end
    expected = {name: fields(eq.assign(scores)) for name, scores in PROBLEMS.items()}
    with multiprocessing.get_context("fork").Pool(2) as children:
        for name, result in zip(PROBLEMS, children.map_async(solve_in_child, PROBLEMS).get(30), strict=True):
            check_same(expected[name], [torch.from_numpy(x) for x in result])


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_where_arrays_lie_in_memory_does_not_matter(kind: type) -> None:
    """Compiled loops have a version for arrays that may overlap; it must round like the other."""
    found: dict[tuple[str, int], set[bytes]] = {}
    for size, apart in itertools.product((5, 13, 20, 31), range(0, 80, 3)):
        row, zeros = np.random.default_rng(0).normal(size=size).astype(kind), np.zeros(size, kind)
        space = np.zeros(3 * (size + apart), kind)
        offers, x, weight = (space[i * (size + apart) :][:size] for i in range(3))
        offers[:] = row
        total = _smoothing._soft_row(offers, zeros, row.max(), kind(2.0), x)
        found.setdefault(("softmax", size), set()).add(np.append(x, total).tobytes())
        for need in (1, 3) if kind is np.float64 else ():
            total = _smoothing.shares(offers, size, need, 0.5, x, weight)
            found.setdefault((f"{need} a row", size), set()).add(np.concatenate([x, weight, [total]]).tobytes())
    assert {name: len(results) for name, results in found.items() if len(results) > 1} == {}


class TestRunBlocks:
    def test_as_many_threads_as_torch_uses(self) -> None:
        blocks = _threads.cut(6, 1)
        for threads, expected in ((1, 1), (2, 2), (3, 3)):
            torch.set_num_threads(threads)
            meeting = threading.Barrier(expected, timeout=60)  # breaks unless that many run at the same time

            def work(start: int, stop: int, meeting: threading.Barrier = meeting) -> str:
                meeting.wait()
                return threading.current_thread().name

            workers = set(_threads.run_blocks(work, blocks[: 2 * expected]))
            assert len(workers) <= expected
            assert threading.current_thread().name in workers

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_results_in_order(self, threads: int) -> None:
        torch.set_num_threads(threads)
        blocks = _threads.cut(23, 4)
        assert blocks[-1] == (20, 23)
        assert _threads.run_blocks(lambda start, stop: (start, stop), blocks) == blocks
        assert _threads.run_blocks(lambda start, stop: (start, stop), []) == []


# Numba looks for a folder to write to beside the source, then in the user's cache. A file in a folder's place stops
# even root, for whom the permissions of a read-only installation do not count.
WITHOUT_CACHE = """
import torch, equipoise as eq
from equipoise.assignment._kernels import _place

a = eq.assign(torch.tensor([[3.0, 1.0], [3.0, 0.0], [3.0, 2.5], [0.0, 1.0]]))
print(eq.__file__)
print(a.z.tolist(), a.value.item(), a.gap.item(), _place.solve_small.stats.cache_path)
"""


@pytest.mark.slow  # compiles what the smallest problem needs
def test_without_a_folder_to_cache_in(fresh_python: Callable[..., str], tmp_path: Path) -> None:
    package = shutil.copytree(
        Path(eq.__file__).parent, tmp_path / "equipoise", ignore=shutil.ignore_patterns("__pycache__")
    )
    blocked = package / "assignment" / "_kernels" / "__pycache__"
    blocked.write_text("not a folder")
    printed = fresh_python(
        WITHOUT_CACHE,
        PYTHONPATH=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",
        NUMBA_CACHE_DIR="",
        XDG_CACHE_HOME=str(blocked),
        HOME=str(blocked),
    ).splitlines()
    assert printed == [str(package / "__init__.py"), "[0, 0, 1, 1] 9.5 0.0 None"]
