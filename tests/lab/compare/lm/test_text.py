# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch

from equipoise_lab.compare.lm import Text, read_text
from equipoise_lab.compare.lm._text import pieces


def test_files_are_in_one_split_each(text: Text) -> None:
    assert sum(text.files) == 60
    together = b"\n".join(bytes(part.tolist()) for part in (text.train, text.validation, text.test))
    for number in range(60):
        assert together.count(f"def f_{number}(".encode()) == 1


def test_names_alone_decide_the_split(sources: Path, text: Text) -> None:
    before = bytes(text.test.tolist())
    for folder in ("test", "site-packages/other"):
        (sources / folder).mkdir(parents=True)
        (sources / folder / "left_out.py").write_text("left out")
    (sources / "latin.py").write_bytes("caf\u00e9".encode("latin-1"))
    again = read_text(sources)
    assert bytes(again.test.tolist()) == before
    assert again.sha256 == text.sha256


def test_other_text_has_another_checksum(sources: Path, text: Text) -> None:
    (sources / "package" / "module_0.py").write_text("x = 1\n")
    assert read_text(sources).sha256 != text.sha256


def test_split_without_files(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="folder must hold Python files for training, validation and test, got no train"
    ):
        read_text(tmp_path)


def test_pieces_reach_both_ends() -> None:
    found = pieces(torch.arange(20, dtype=torch.int16), 3, 4)
    assert found.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11], [15, 16, 17, 18, 19]]
