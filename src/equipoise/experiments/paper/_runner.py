# SPDX-License-Identifier: Apache-2.0
"""Runs the experiment on several processes, keeps what is done, and goes on where it was interrupted.

What runs at once (a unit: one method, one way of sampling) is one task of a process that uses one thread: tensors this
small gain nothing from more. A unit that ends is written to `units/`, and `results.csv` is written anew.
"""

import ctypes
import json
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from equipoise.experiments._timing import num_threads
from equipoise.experiments.paper._recipe import Paper, Run
from equipoise.experiments.paper._results import Result, write_results
from equipoise.experiments.paper._studies._traces import checkpoints
from equipoise.experiments.paper._train import Trained, train

Progress = Callable[[int], object]
"""Called with a number of steps that are done."""

Task = tuple[Any, ...]
"""A function and its arguments; it takes a further one, `progress`."""


def run_units(
    recipe: Paper, out: Path, *, workers: int | None = None, progress: Progress | None = None
) -> list[Result]:
    """Trains every run of a recipe that `out` does not hold yet.

    Args:
        recipe: the experiment.
        out: folder for `results.csv` and `units/`.
        workers: processes; 0 stays in this one. None: one for each core.
        progress: called with steps as they are done, those of units that were found counted at once.

    Returns:
        The results of all runs, in the order of `Paper.runs`.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    advance = progress or _ignore
    folder = out / "units"
    folder.mkdir(parents=True, exist_ok=True)
    # The slowest first, so that no process is left with a long task at the end.
    units = dict(sorted(recipe.units().items(), key=lambda item: _cost(*item), reverse=True))
    done: dict[str, Trained] = {}
    for name in list(units):
        found = _load(folder / f"{name}.json", units[name], recipe)
        if found is not None:
            done[name] = found
            advance(recipe.steps)
    missing = {name: (_train_unit, runs, recipe) for name, runs in units.items() if name not in done}
    for name, trained in run_tasks(missing, workers, advance):
        _save(folder / f"{name}.json", trained, recipe)
        done[name] = trained
        write_results(out / "results.csv", _collect(done, recipe))
    results = _collect(done, recipe)
    write_results(out / "results.csv", results)
    return results


def _ignore(steps: int) -> None:
    del steps


def load_unit(out: Path, name: str, recipe: Paper) -> Trained | None:
    """Reads the models of a unit back.

    Args:
        out: the folder of the command.
        name: see `Run.unit`.
        recipe: the experiment.

    Returns:
        The models, or None where the folder holds none that this recipe would give.
    """
    return _load(out / "units" / f"{name}.json", recipe.units().get(name, []), recipe)


def _cost(name: str, runs: Sequence[Run]) -> float:
    """About how long a unit takes: its size, more for balancing and for solving assignments."""
    return len(runs) * (1 + 0.5 * ("sinkhorn" in name) + 0.3 * ("gm" in name))


def _collect(done: dict[str, Trained], recipe: Paper) -> list[Result]:
    """The results of the units that are done, in the order of the recipe."""
    by_run: dict[Run, Result] = {}
    for trained in done.values():
        by_run.update(zip(trained.runs, trained.results(recipe), strict=True))
    return [by_run[run] for run in recipe.runs() if run in by_run]


def run_tasks(tasks: Mapping[str, Task], workers: int, advance: Progress) -> Iterator[tuple[str, Any]]:
    """Calls functions on several processes, with one thread each.

    Args:
        tasks: the calls by name, in the order in which to start them.
        workers: processes; 0 stays in this one.
        advance: called with what the functions hand to their argument `progress`.

    Yields:
        Name and result, as they end.
    """
    if workers == 0:
        for name, (function, *arguments) in tasks.items():
            with num_threads(1):
                result = function(*arguments, progress=advance)
            yield name, result
        return
    if not tasks:
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads in an unknown state
    steps = context.Queue()
    with ProcessPoolExecutor(
        min(workers, len(tasks)), mp_context=context, initializer=_start_worker, initargs=(steps,)
    ) as pool:
        waiting = {pool.submit(_call, *task): name for name, task in tasks.items()}
        try:
            while waiting:
                ended, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                with suppress(queue.Empty):
                    while True:
                        advance(steps.get_nowait())
                for future in ended:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_steps: Any = None


def _start_worker(steps: Any) -> None:
    global _steps
    _steps = steps
    torch.set_num_threads(1)
    _keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _keep_memory() -> None:
    """Lets the C library keep what is freed, where it is glibc.

    A step allocates and frees some hundred tensors of about 300 kB. By default most of that goes back to the system, to
    be asked for, and cleared, again: a sixth of the time.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3  # names of parameters, from malloc.h
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 1 << 30)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone: killed, it has no chance to end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments, progress=_steps.put)


def _train_unit(runs: Sequence[Run], recipe: Paper, *, progress: Progress) -> Trained:
    # The plain runs are looked into later.
    kept = checkpoints(recipe.steps) if any(run.variant == "plain" for run in runs) else ()
    return train(runs, recipe, snapshots=kept, progress=progress)


def _fingerprint(recipe: Paper) -> dict[str, Any]:
    """What the models of a unit depend on: not how they are measured, nor which other units there are."""
    described = recipe.describe()
    for name in ("methods", "losses", "variants", "temperatures", "seeds", "sweeps", "measure", "measured_at"):
        del described[name]
    return {"version": version("equipoise"), "recipe": described}


def _save(path: Path, trained: Trained, recipe: Paper) -> None:
    content = {
        **_fingerprint(recipe),
        "runs": [asdict(run) for run in trained.runs],
        "parameters": trained.parameters.tolist(),
        "mse": trained.mse.tolist(),
        "mse_expected": trained.mse_expected.tolist(),
        "snapshots": {step: parameters.tolist() for step, parameters in trained.snapshots.items()},
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def _load(path: Path, runs: Sequence[Run], recipe: Paper) -> Trained | None:
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    if {key: content.get(key) for key in ("version", "recipe")} != _fingerprint(recipe):
        return None
    if [asdict(run) for run in runs] != content["runs"]:
        return None
    return Trained(
        runs=tuple(runs),
        parameters=torch.tensor(content["parameters"]),
        mse=torch.tensor(content["mse"]),
        mse_expected=torch.tensor(content["mse_expected"]),
        snapshots={int(step): torch.tensor(parameters) for step, parameters in content["snapshots"].items()},
    )
