# SPDX-License-Identifier: Apache-2.0
"""The library computes what it computed when `golden.npz` was stored.

Integers and booleans exactly, floats within rounding, which differs between processors. To see whether they are equal
to the bit on the machine that stored them: `python tests/golden/make_golden.py --compare`.
"""

import subprocess
import sys
from pathlib import Path

import golden_api
import make_golden
import numpy as np
import pytest

KINDS = ("strategy", "rounds", "sampler", "assign", "balance", "router", "model")
REMEDY = "if a change of numbers is meant, or a case is new, run python tests/golden/make_golden.py and say why"


def compute_afresh(path: Path) -> dict[str, make_golden.Arrays]:
    """Computes all cases in an interpreter of its own: the hook that checks signatures takes longer than they do."""
    command = [sys.executable, "-W", "error", make_golden.__file__, "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return make_golden.load(path)[1]


def test_same_numbers(tmp_path: Path) -> None:  # one test, so that tests on several processes compute the cases once
    found, (_, stored) = compute_afresh(tmp_path / "found.npz"), make_golden.load(make_golden.STORE)
    assert set(found) == set(stored), REMEDY
    assert {tuple(case.split("/")[:2]) for case in stored} == {(d, kind) for d in make_golden.RTOL for kind in KINDS}
    beyond = [
        f"{case}: {name} differs by {largest:.1e}"
        for case in stored
        for name, largest in make_golden.compare(found[case], stored[case]).items()
        if not largest <= make_golden.tolerance(case)
    ]
    assert not beyond, "\n".join([f"{len(beyond)} arrays; {REMEDY}", *beyond[:20]])


def test_a_difference_is_found() -> None:
    x = np.array([1.0, -2.0, 0.0, np.inf])
    one = np.array([0, 0, 0, 1])
    assert make_golden.difference("weight", x, x) == 0.0
    assert make_golden.difference("weight", 1.001 * x, x) == pytest.approx(1e-3)
    assert make_golden.difference("weight", x + [0, 0, 1e-8, 0], x) == pytest.approx(0.5e-8)
    assert make_golden.difference("train.prices", 1e-9 * one, 0.0 * one) == pytest.approx(1e-9)
    for y in (x.astype(np.float32), x[:3], x[:, None], -x, np.where(one, 0.0, x), np.where(one, x, np.nan)):
        assert make_golden.difference("weight", y, x) == np.inf
    assert make_golden.difference("weight", 1e-300 * one, 0.0 * one) == np.inf  # there is no magnitude to compare with
    assert make_golden.difference("z", one, one) == 0.0
    assert make_golden.difference("z", one + 1, one) == np.inf
    assert make_golden.compare({"z": one, "new": one}, {"z": one, "old": one}) == {
        "z": 0.0,
        "new": np.inf,
        "old": np.inf,
    }
    assert make_golden.same_bits({"x": -0.0 * x[:3], "z": one}, {"x": 0.0 * x[:3], "z": one}) == 1


def test_renamed_parameters_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden_api, "STORED_NAMES", {"router.gate.weight": "router.weight"})
    assert golden_api.stored_name("router.gate.weight") == "router.weight"
    assert golden_api.stored_name("first.router.gate.weight") == "first.router.weight"
    assert golden_api.stored_name("other_router.gate.weight") == "other_router.gate.weight"
