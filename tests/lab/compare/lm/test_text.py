# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from equipoise_lab.compare.lm import Text, Vocabulary, read_text
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


@pytest.mark.parametrize("size", [128, 129, 140, 4096])
def test_vocabularies_divide_text_and_lose_nothing(sources: Path, size: int) -> None:
    plain, divided = read_text(sources), read_text(sources, vocabulary=size)
    vocabulary = Vocabulary.fit(bytes(plain.train.tolist()), size)
    assert len(vocabulary) == len(divided.lengths) <= size
    for name in ("train", "validation", "test"):
        ids = getattr(divided, name)
        assert b"".join(vocabulary.pieces[i] for i in ids.tolist()) == bytes(getattr(plain, name).tolist())
    assert plain.describe()["bytes"] == divided.describe()["bytes"]
    assert plain.sha256 == divided.sha256


def test_pairs_are_found_as_by_hand() -> None:
    words = (b"low", b" low", b" lower", b" lowest", b" newer", b" new")
    vocabulary, ids = Vocabulary([]), [[*word] for word in words]
    for number in range(6):  # count all pairs anew each time
        counts = Counter(pair for word in ids for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        vocabulary = Vocabulary([*vocabulary.merges, best])
        ids = [
            vocabulary.encode(piece).tolist() for piece in (b"low", b" low", b" lower", b" lowest", b" newer", b" new")
        ]
        assert Vocabulary.fit(b"".join(words), 129 + number).merges == vocabulary.merges


def test_pieces_reach_both_ends() -> None:
    found = pieces(torch.arange(20, dtype=torch.int16), 3, 4)
    assert found.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11], [15, 16, 17, 18, 19]]
