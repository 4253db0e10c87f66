# SPDX-License-Identifier: Apache-2.0
"""Who waits for kernels to be compiled is told so: once, after a while, and by one process."""

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from equipoise._core import _jit, _notice
from equipoise._core._notice import compiling


class Timer:
    """A clock that never strikes by itself."""

    made: list["Timer"] = []

    def __init__(self, interval: float, function: Callable[..., None], arguments: list[Any]) -> None:
        self.interval, self.strike, self.running = interval, lambda: function(*arguments), False
        Timer.made.append(self)

    def start(self) -> None:
        self.running = True

    def cancel(self) -> None:
        self.running = False


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_notice, "_spent", 0.0)
    monkeypatch.setattr(_notice, "_said", False)
    monkeypatch.setattr(_notice.threading, "Timer", Timer)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    Timer.made.clear()


def test_one_line_that_says_what_how_long_and_how_often(caplog: pytest.LogCaptureFixture) -> None:
    with compiling("some/folder"):
        Timer.made[0].strike()
        Timer.made[0].strike()
    with compiling("some/folder"):
        pass
    assert len(Timer.made) == 1
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("equipoise", logging.WARNING)
    assert record.getMessage() == (
        "equipoise: compiling kernels, about 20 seconds. This happens once: later processes load them from some/folder."
    )


def test_says_when_nothing_can_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    with compiling(None):
        Timer.made[0].strike()
    assert "every process does this: set NUMBA_CACHE_DIR" in caplog.text


def test_seconds_add_up_over_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.5, 10.0, 10.25, 20.0, 25.0, 30.0, 30.0])
    monkeypatch.setattr(_notice.time, "monotonic", lambda: next(times))
    for _ in range(4):
        with compiling(None):
            assert Timer.made[-1].running
        assert not Timer.made[-1].running
    assert [timer.interval for timer in Timer.made] == [2.0, 0.5, 0.25, 0.0]
    assert caplog.records == []


def test_a_kernel_that_does_not_compile_stops_the_clock() -> None:
    with pytest.raises(RuntimeError), compiling(None):
        raise RuntimeError
    assert not Timer.made[0].running


@pytest.mark.parametrize(
    ("variables", "silent"),
    [
        ({}, False),
        ({"RANK": "0", "LOCAL_RANK": "0"}, False),
        ({"RANK": "3", "LOCAL_RANK": "3"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, True),
    ],
)
def test_rank_0_speaks_for_the_others(variables: dict[str, str], silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with compiling(None):
        assert (Timer.made == []) == silent


class InWorker(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        return _notice.in_worker()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("workers", [0, 1])
def test_workers_of_a_data_loader_are_silent(workers: int) -> None:
    context = "fork" if workers else None
    (silent,) = DataLoader(InWorker(), num_workers=workers, multiprocessing_context=context)
    assert silent.item() == (workers > 0)


def test_no_word_about_kernels_from_the_cache(load_kernel: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str | None] = []

    def note(folder: str | None) -> Any:
        folders.append(folder)
        return compiling(folder)

    monkeypatch.setattr(_jit, "compiling", note)
    kernel = load_kernel().add_two
    kernel(1)
    assert set(folders) == {kernel.stats.cache_path}
    folders.clear()
    load_kernel().add_two(1)
    assert folders == []


SHOWN = """
import sys, logging
from equipoise._core import _notice
sys.stderr = sys.stdout
if sys.argv[1] == "silenced":
    logging.getLogger("equipoise").setLevel(logging.ERROR)
_notice._say(None)
"""


@pytest.mark.parametrize(("case", "lines"), [("default", 1), ("silenced", 0)])
def test_shown_unless_silenced(case: str, lines: int, fresh_python: Callable[..., str]) -> None:
    assert len(fresh_python(SHOWN, case).splitlines()) == lines
