# SPDX-License-Identifier: Apache-2.0
"""Stores what the library computes on fixed problems, or compares with what was stored.

    python tests/golden/make_golden.py              # writes golden.npz beside this file
    python tests/golden/make_golden.py --compare    # prints what is equal to the bit, and the largest difference
    python tests/golden/make_golden.py --compare --cases    # a line for each case, not for each group of cases

The file has one array for each type of number, with all values one after the other, a `header` (JSON: command,
versions, date, processor) and an `index` (JSON: type, start and shape of each array, by case and name). Arrays that are
equal are stored once.
"""

import argparse
import json
import platform
import sys
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import golden_cases
import numpy as np
import torch
from torch import Tensor

STORE = Path(__file__).with_name("golden.npz")
RTOL = {"float64": 1e-9, "float32": 1e-5}
# Differences of numbers of magnitude 1 (scores, fractions), so they are as exact as those, however small they are.
DIFFERENCES = ("gap", "prices", "max_violation", "fraction_dropped")

Arrays = dict[str, np.ndarray]


def compute() -> Iterator[tuple[str, Arrays]]:
    """Yields each case with its arrays, computed on one thread; torch's global stream is left as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            for case, run in golden_cases.all_cases():
                yield case, {name: as_array(value) for name, value in run().items() if value is not None}
    finally:
        torch.set_num_threads(threads)


def as_array(value: Any) -> np.ndarray:
    return value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)


def save(cases: Iterator[tuple[str, Arrays]], path: Path) -> int:
    """Writes all cases, and returns the number of arrays."""
    index: dict[str, dict[str, list[Any]]] = {}
    values: dict[str, list[np.ndarray]] = {}
    lengths: dict[str, int] = {}
    known: dict[tuple[str, bytes], int] = {}
    for case, arrays in cases:
        index[case] = {}
        for name, array in arrays.items():
            kind = array.dtype.name
            key = (kind, array.tobytes())
            if key not in known:
                known[key] = lengths.get(kind, 0)
                lengths[kind] = known[key] + array.size
                values.setdefault(kind, []).append(array.ravel())
            index[case][name] = [kind, known[key], list(array.shape)]
    header = {
        "command": "python tests/golden/make_golden.py",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
    }
    texts = {"header": np.array(json.dumps(header)), "index": np.array(json.dumps(index))}
    np.savez_compressed(path, **texts, **{kind: np.concatenate(parts) for kind, parts in values.items()})
    return sum(map(len, index.values()))


def load(path: Path) -> tuple[dict[str, str], dict[str, Arrays]]:
    """Reads the header, and the arrays by case."""
    with np.load(path, allow_pickle=False) as file:
        stored = {name: file[name] for name in file.files}
    cases: dict[str, Arrays] = {}
    for case, entries in json.loads(str(stored["index"])).items():
        cases[case] = {
            name: stored[kind][start : start + int(np.prod(shape))].reshape(shape)
            for name, (kind, start, shape) in entries.items()
        }
    return json.loads(str(stored["header"])), cases


def difference(name: str, found: np.ndarray, stored: np.ndarray) -> float:
    """The largest difference over the largest magnitude of the array; infinite where types, shapes or integers differ.

    Entries that nearly cancel have no digits of their own, so they are measured by the array that they are part of.
    """
    if found.dtype != stored.dtype or found.shape != stored.shape:
        return np.inf
    if np.array_equal(found, stored, equal_nan=stored.dtype.kind == "f"):
        return 0.0
    finite = np.isfinite(stored)
    if stored.dtype.kind != "f" or not np.array_equal(found[~finite], stored[~finite], equal_nan=True):
        return np.inf
    scale = np.abs(stored[finite]).max()
    if name.split(".")[-1] in DIFFERENCES:
        scale = max(scale, 1.0)
    with np.errstate(divide="ignore"):
        largest = np.abs(found[finite].astype(np.float64) - stored[finite]).max() / np.float64(scale)
    return float(np.nan_to_num(largest, nan=np.inf, posinf=np.inf))


def tolerance(case: str) -> float:
    return RTOL[case.split("/")[0]]


def compare(found: Arrays, stored: Arrays) -> dict[str, float]:
    """The difference of every array of a case; infinite for one that only one side has."""
    return {
        name: difference(name, found[name], stored[name]) if name in found and name in stored else np.inf
        for name in {**stored, **found}
    }


def same_bits(found: Arrays, stored: Arrays) -> int:
    """How many arrays are equal to the bit: type, shape and bytes."""
    return sum(
        a.dtype == stored[name].dtype and a.shape == stored[name].shape and a.tobytes() == stored[name].tobytes()
        for name, a in found.items()
        if name in stored
    )


def report(path: Path, each_case: bool) -> bool:
    """Prints the comparison, and returns whether everything is within the tolerance."""
    header, stored = load(path)
    lines, beyond = {}, []
    for case, found in compute():
        before = stored.pop(case, {})
        differences = compare(found, before)
        group = case if each_case else "/".join(case.split("/")[:3])
        equal, total, largest = lines.get(group, (0, 0, 0.0))
        lines[group] = (equal + same_bits(found, before), total + len(differences), max(largest, *differences.values()))
        beyond += [f"{case}: {name} {d:.1e}" for name, d in differences.items() if not d <= tolerance(case)]
    beyond += [f"{case}: not computed any more" for case in stored]
    say(f"stored on {header['date']}, {header['processor']}, torch {header['torch']}, numpy {header['numpy']}")
    say(f"here: {processor()}, torch {torch.__version__}, numpy {np.__version__}")
    say(f"{'arrays equal to the bit':>24}  largest relative difference  case")
    for group, (equal, total, largest) in lines.items():
        say(f"{equal:>15} of {total:>5}  {largest:>27.1e}  {group}")
    equal, total, largest = zip(*lines.values(), strict=True)
    say(f"{sum(equal):>15} of {sum(total):>5}  {max(largest):>27.1e}  all")
    say("\n".join(["beyond the tolerance:", *beyond]) if beyond else f"all within the tolerance {RTOL}")
    return not beyond


def processor() -> str:
    """The processor's name, and the vector instructions that torch uses on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def say(line: str) -> None:
    print(line)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="compare with what is stored, and write nothing")
    parser.add_argument("--out", type=Path, default=STORE, help="where to write")
    parser.add_argument("--cases", action="store_true", help="with --compare: a line for each case")
    arguments = parser.parse_args()
    if arguments.compare:
        return 0 if report(STORE, arguments.cases) else 1
    count = save(compute(), arguments.out)
    with zipfile.ZipFile(arguments.out) as file:
        sizes = ", ".join(f"{entry.filename[:-4]} {entry.compress_size // 1000} kB" for entry in file.infolist())
    say(f"{count} arrays in {arguments.out.name}, {arguments.out.stat().st_size / 1000:.0f} kB ({sizes})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
