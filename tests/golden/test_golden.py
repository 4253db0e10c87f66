# SPDX-License-Identifier: Apache-2.0
"""The library computes what it computed when `golden.npz` was stored.

Integers and booleans exactly, floats within rounding, which differs between processors. To see whether they are equal
to the bit on the machine that stored them: `python tests/golden/make_golden.py --compare`.
"""

import subprocess
import sys

import make_golden
import numpy as np
import pytest

KINDS = ("strategy", "rounds", "sampler", "assign", "balance", "router", "model")
REMEDY = "if a change of numbers is meant, or a case is new, run python tests/golden/make_golden.py and say why"


@pytest.fixture(scope="module")
def stored() -> dict[str, make_golden.Arrays]:
    return make_golden.load(make_golden.STORE)[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, make_golden.Arrays]:
    path = tmp_path_factory.mktemp("golden") / "found.npz"
    # In an interpreter of its own: the hook that checks signatures takes more time than all cases.
    command = [sys.executable, "-W", "error", make_golden.__file__, "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return make_golden.load(path)[1]


def test_same_cases(found: dict[str, make_golden.Arrays], stored: dict[str, make_golden.Arrays]) -> None:
    assert set(found) == set(stored), REMEDY
    assert {tuple(case.split("/")[:2]) for case in stored} == {(d, kind) for d in make_golden.RTOL for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", make_golden.RTOL)
def test_same_numbers(
    dtype: str, kind: str, found: dict[str, make_golden.Arrays], stored: dict[str, make_golden.Arrays]
) -> None:
    cases = [case for case in stored if case.startswith(f"{dtype}/{kind}/")]
    beyond = {
        f"{case}: {name}": largest
        for case in cases
        for name, largest in make_golden.compare(found.get(case, {}), stored[case]).items()
        if not largest <= make_golden.RTOL[dtype]
    }
    assert len(cases) > 0
    assert not beyond, REMEDY


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
