# SPDX-License-Identifier: Apache-2.0
"""The example in small: all routers, the same losses after a resume, and what it writes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import equipoise as eq
import train_lm

SIZES = {"dim": 8, "heads": 2, "blocks": 2, "context": 16, "batch": 4, "experts": 4, "warmup": 2, "log-every": 1}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"def f_{number}(x):\n    return x + {number}\n" * 8)
    return folder


def run(text: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    train_lm.main([*SMALL, "--data", str(text), "--pattern", "*.txt", "--out", str(out), *options])
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("router", sorted(eq.nn.ROUTERS))
def test_every_router_trains(text: Path, tmp_path: Path, router: str) -> None:
    first, second, validated = run(text, tmp_path / "out", "--router", router, "--steps", "2", "--generate", "1")
    assert 4.0 < first["loss"] < 7.0
    assert list(second["layers"]) == ["blocks.0.moe", "blocks.1.moe"]
    assert sum(second["layers"]["blocks.0.moe"]["load"]) > 0
    assert validated["validation"]["loss"] > 0


def test_mixed_precision_accumulation_and_text(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--top-k", "2", "--amp", "--accumulate", "2", "--prompt", "ab", "--generate", "5"]
    records = run(text, tmp_path / "out", "--steps", "2", *options)
    assert [record["step"] for record in records] == [1, 2, 2]
    written = capsys.readouterr().out
    assert written.startswith("\nab")
    assert len(written) <= len("\nab\n") + 5


def test_learns(text: Path, tmp_path: Path) -> None:
    records = run(text, tmp_path / "out", "--steps", "30", "--lr", "0.02", "--generate", "1")
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("router", ["skip-iw", "priced"])
def test_resumes_to_the_same_losses(text: Path, tmp_path: Path, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--router", router, "--steps", "6", "--eval-every", "3", "--generate", "1"]
    whole = run(text, tmp_path / "whole", *options)

    train_step = train_lm.Training.train_step

    def interrupted(self: train_lm.Training, text: Any) -> Any:
        if self.step == 5:
            raise KeyboardInterrupt
        return train_step(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(train_lm.Training, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(text, tmp_path / "parts", *options)
    resumed = run(text, tmp_path / "parts", *options, "--resume")
    for record in (*whole, *resumed):
        record.pop("seconds", None)
    assert resumed == whole


def test_two_processes_resume_to_the_same_losses(text: Path, tmp_path: Path) -> None:
    """Experts over two ranks, as torchrun starts them; only the first prints and logs."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        train_lm.__file__,
    ]
    options = [
        "--data",
        str(text),
        "--pattern",
        "*.txt",
        "--out",
        str(tmp_path),
        "--router",
        "gm-iw-mix",
        "--scope",
        "global",
    ]
    options += [*SMALL, "--steps", "4", "--eval-every", "2", "--generate", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    logs: list[list[dict[str, Any]]] = []
    for resume in ([], ["--resume"]):
        done = subprocess.run(
            [*command, *options, *resume], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("def ") == 1
        records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        for record in records:
            record.pop("seconds", None)
        logs.append(records)
        shutil.rmtree(tmp_path / "checkpoint-4")
    assert logs[0] == logs[1]
    assert sum(logs[0][0]["layers"]["blocks.0.moe"]["load"]) == 2 * 4 * 16  # the rows of both


def test_lines_where_tqdm_is_missing(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    run(text, tmp_path / "out", "--steps", "2", "--generate", "1")
    assert "step 1 of 2: loss " in capsys.readouterr().out


def test_too_few_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data must hold at least 20 files that match '\*.txt', got 0 .* or cut a la"):
        run(tmp_path, tmp_path / "out")


def test_one_file_or_no_folder(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("def f(x): return x")
    with pytest.raises(ValueError, match=r"data must be a folder, got .*all.txt, a file: .* at least 20 parts"):
        run(tmp_path / "all.txt", tmp_path / "out")
    with pytest.raises(ValueError, match=r"data must be a folder, got .*none, nothing there"):
        run(tmp_path / "none", tmp_path / "out")


def test_nothing_to_resume_from(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out must hold a checkpoint to resume from, got .*: leave out --resume"):
        run(text, tmp_path / "out", "--resume")


def test_help_says_how_many_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_lm.parse(["--help"])
    assert "at least 20 files" in " ".join(capsys.readouterr().out.split())
