# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from equipoise.estimators import STRATEGIES
from equipoise_lab.cli import main

MODULE = """
from dataclasses import replace
from equipoise.estimators import STRATEGIES

twin = replace(STRATEGIES["sample"], name="twin")
costly = replace(STRATEGIES["sample"], name="a$b {c} [d] \\\\frac$")
nameless = object()


class Silent:
    name, label, respects_capacity, unbiased = "silent", "Silent", False, True
    draw_noise = STRATEGIES["sample"].draw_noise

    def draw(self, log_p, noise, **how):
        return None


class Wide(Silent):
    name = "wide"

    def draw(self, log_p, noise, **how):
        s, weight = STRATEGIES["sample"].draw(log_p, noise, **how)
        return s, weight[..., None]


silent, wide = Silent(), Wide()
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["audit", *arguments])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "audited_strategies.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_strategies_by_default(capsys: pytest.CaptureFixture[str], in_folder: Path) -> None:
    code, out, err = run(capsys, "--draws", "5000", "--n", "4", "--out", "here")
    assert (code, err) == (0, "")
    for name in STRATEGIES:
        assert f"] {name}: " in out
    for baseline in ("ema", "expert-mean", "critic", "residual", "leave-one-out", "draws"):
        assert f"] skip-iw + {baseline}: " in out
    names = {f"{name}.{ending}" for name in ("audit", "audit-cost") for ending in ("svg", "png")}
    assert {path.name for path in (in_folder / "here").iterdir()} == {"audit.json", *names}
    stored = json.loads((in_folder / "here" / "audit.json").read_text())
    assert stored["options"]["draws"] == 5000
    assert len(stored["strategies"]) == len(STRATEGIES) + 3 * 6


def test_strategy_of_a_users_own(capsys: pytest.CaptureFixture[str], in_folder: Path) -> None:
    chosen = ["--strategy", "audited_strategies:twin", "--strategy", "sample", "--strategy", "sample"]
    options = ["--draws", "2000", "--sinkhorn-first", "--no-importance", "--baseline", "leave-one-out"]
    code, out, err = run(capsys, *chosen, *options)
    assert (code, err) == (0, "")
    assert "row effect 1, Sinkhorn first, no importance weights" in " ".join(out.split())
    assert "[1/2] twin + leave-one-out: " in out
    twin, sample = json.loads((in_folder / "out" / "audit" / "audit.json").read_text())["strategies"]
    assert (twin["name"], sample["name"]) == ("twin", "sample")
    assert twin["router"]["mean"] == sample["router"]["mean"]


def test_a_name_is_drawn_as_it_is(capsys: pytest.CaptureFixture[str], in_folder: Path) -> None:
    code, out, err = run(capsys, "--strategy", "audited_strategies:costly", "--draws", "2000")
    assert (code, err) == (0, "")
    name = r"a$b {c} [d] \frac$"
    assert f"[1/1] {name}: " in out
    for picture in ("audit.svg", "audit-cost.svg"):
        assert name in (in_folder / "out" / "audit" / picture).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "temperature must be finite and >= 0, got -1"),
        (("--temperature", "nan"), "temperature must be finite and >= 0, got nan"),
        (("--temperature", "0"), "importance weights must have temperature > 0"),
        (("--temperature", "0", "--sinkhorn-first"), "temperature must be finite and > 0 with sinkhorn_first"),
        (("--draws", "1"), "draws must be an integer >= 2, got 1"),
        (("--capacity", "3"), "capacity"),
        (("--capacity", "0"), "capacity must be an integer >= 1, got 0"),
        (("--k", "1"), "k must be an integer >= 2, got 1"),
        (("--sharpness", "nan"), "sharpness must be finite"),
        (("--baseline", "median"), "baseline must be one of 'none', 'ema'"),
        (("--capacity-factor", "-1"), "capacity_factor must be finite and > 0, got -1"),
        (("--capacity-factor", "1.5", "--capacity", "6"), "capacity_factor must not be given beside capacity"),
        (("--row-effect", "nan"), "row_effect must be finite and >= 0, got nan"),
        (("--eps", "1"), "eps must be in [0, 1), got 1"),
        (("--solves", "0"), "solves must be an integer >= 1, got 0"),
        (("--seed", str(2**70)), "seed must be an integer from 0 to 2**62 - 1"),
        (("--eps", "0.1", "--strategy", "sample"), "eps must be left out where no strategy mixes"),
        (("--strategy", "best"), "sample, skip-iw, skip, gm-iw, gm-sh, gm"),
        (("--strategy", "no_such_module:best"), "no_such_module"),
        (("--strategy", "audited_strategies:missing"), "audited_strategies has no missing"),
        (("--strategy", "audited_strategies:nameless"), "must have an attribute name"),
        (("--strategy", "audited_strategies:Silent"), "must draw as equipoise.estimators.Strategy says"),
        (("--strategy", "audited_strategies:silent"), "must return (Sample, weight) from draw, got NoneType"),
        (("--strategy", "audited_strategies:wide"), "weight of strategy 'wide' must have shape [2, 8]"),
    ],
)
def test_error_of_the_user_is_one_line(
    capsys: pytest.CaptureFixture[str], in_folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("equipoise: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_folder_that_cannot_be_written_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str], in_folder: Path
) -> None:
    (in_folder / "file").write_text("")
    code, out, err = run(capsys, "--out", "file/inside")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "file" in err
