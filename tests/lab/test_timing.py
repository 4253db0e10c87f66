# SPDX-License-Identifier: Apache-2.0
import gc

import pytest
import torch

from equipoise_lab import _timing
from equipoise_lab._timing import best_in_turns, best_of, best_of_each, num_threads


class Clock:
    """A clock that the timed calls move forward themselves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(_timing.time, "perf_counter", lambda: self.now)

    def call(self, *durations: float):
        remaining = list(durations)

        def run() -> int:
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]
            return len(remaining)

        return run


def test_best_repetition_counts_and_the_first_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = best_of(Clock(monkeypatch).call(0.1, 0.2, 5.0, 3.0, 4.0), 3, budget=10.0)
    assert timing.seconds == pytest.approx(3.0)
    assert timing.repeats == 3


def test_fast_call_is_averaged_over_enough_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timing = best_of(clock.call(0.01, 0.002), 5, budget=1.0)  # the first has to load something
    assert timing.seconds == pytest.approx(0.002)
    assert clock.now == pytest.approx(0.01 + 0.002 + 5 * 0.02)


def test_call_over_budget_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timing = best_of(clock.call(7.0, 6.0), 5, budget=5.0)
    assert (timing.seconds, timing.repeats, clock.now) == (6.0, 2, 13.0)


def test_slow_start_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = best_of(Clock(monkeypatch).call(40.0, 2.0), 4, budget=5.0)
    assert (timing.seconds, timing.repeats) == (2.0, 4)


def test_patience_ends_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = best_of(Clock(monkeypatch).call(1.0), 100, budget=1.0)
    assert timing.repeats == 3


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = Clock(monkeypatch), []

    def make(name: str, seconds: float):
        run = clock.call(seconds)
        return lambda: (order.append(name), run())

    best = best_of_each({"a": make("a", 1.0), "b": make("b", 2.0)}, repeats=2)
    assert best == pytest.approx({"a": 1.0, "b": 2.0})
    assert order == ["a", "a", "b", "b", *["a", "b"] * 2]


def test_a_slow_call_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timings = best_in_turns({"slow": clock.call(7.0, 6.0), "fast": clock.call(0.5, 0.4, 0.3)}, 3, budget=5.0)
    assert (timings["slow"].seconds, timings["slow"].repeats) == (6.0, 2)
    assert (timings["fast"].seconds, timings["fast"].repeats) == (pytest.approx(0.3), 3)


def test_collector_is_restored() -> None:
    assert gc.isenabled()
    best_of(lambda: None, 1, budget=1.0)
    assert gc.isenabled()


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with num_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.get_num_threads() == before
