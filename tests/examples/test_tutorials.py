# SPDX-License-Identifier: Apache-2.0
"""The tutorials run, in small: what `make tutorials` renders is code that works."""

import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALLER = {
    "assignment_in_pictures": {},
    "first_moe": {"range(300)": "range(2)"},
    "gumbel_matching": {"DRAWS = 4000": "DRAWS = 40", "STEPS = 1500": "STEPS = 2"},
    "language_model": {"STEPS = 200": "STEPS = 2", '"--log-every", "10"': '"--log-every", "1"'},
    "own_strategy": {"draws=100_000": "draws=2_000", "range(200)": "range(2)"},
    "several_processes": {"STEPS = 2, 20": "STEPS = 2, 2"},
    "swap_routers": {"range(20)": "range(2)", "range(30)": "range(2)"},
}


def small(name: str) -> str:
    """The code of a tutorial with smaller numbers."""
    code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    for old, new in SMALLER[name].items():
        assert old in code, old
        code = code.replace(old, new)
    return code


def test_all_tutorials_are_here() -> None:
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py") if "# %% [markdown]" in path.read_text()}
    assert scripts == set(SMALLER)


@pytest.mark.parametrize("name", sorted(set(SMALLER) - {"several_processes"}))
def test_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mpl.use("agg")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # restored gates say what they lose, and so they should
        exec(compile(small(name), f"{name}.py", "exec"), {"__name__": "__main__"})
    plt.close("all")
    assert capsys.readouterr().out


def test_several_processes(tmp_path: Path) -> None:
    script = tmp_path / "several_processes.py"
    script.write_text(small("several_processes"))
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=240)
    assert ran.stdout.count("rank") == 4, ran.stderr
