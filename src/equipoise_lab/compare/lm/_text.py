# SPDX-License-Identifier: Apache-2.0
"""The text that is learnt: the sources of Python's standard library, as bytes, split by file."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from equipoise_lab.compare.lm._vocabulary import BYTES, Vocabulary

SPLITS = ("train", "validation", "test")
# Of 256 values of a hash: a file's name alone decides where it belongs, whatever else is installed.
_HELD_OUT = 13
_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of three splits, with no file in two of them.

    Files hold ASCII alone, so that a loss in nats a byte needs no rule for rare bytes.
    """

    train: Int[Tensor, "ids"]  # one file after the other
    validation: Int[Tensor, "ids_"]  # what settings are chosen on
    test: Int[Tensor, "ids__"]  # read once, by the runs at the chosen settings
    files: tuple[int, int, int]  # of each split
    sha256: str  # of all three; another Python has other sources
    lengths: Int[Tensor, "V"]  # bytes of each id

    def describe(self) -> dict[str, Any]:
        """Lists the sizes, as JSON knows them."""
        sizes = {name: int(self.lengths[getattr(self, name).long()].sum()) for name in SPLITS}
        ids = {name: len(getattr(self, name)) for name in SPLITS}
        files = dict(zip(SPLITS, self.files, strict=True))
        return {"files": files, "bytes": sizes, "ids": ids, "sha256": self.sha256}


def read_text(folder: Path | None = None, *, vocabulary: int = BYTES) -> Text:
    """Reads the Python files below a folder that hold ASCII alone, without tests and installed packages.

    Args:
        folder: where they are; None: the standard library of this Python.
        vocabulary: token ids at most: 128, the bytes; above, with pairs of ids that the training split repeats.

    Returns:
        The splits: 5% of the files each for validation and test.

    Raises:
        ValueError: a split has no file.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: dict[str, list[bytes]] = {name: [] for name in SPLITS}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not set(name.parts) & set(_LEFT_OUT) and (content := path.read_bytes()).isascii():
            parts[_split_of(name.as_posix())].append(content)
    for name, contents in parts.items():
        if not any(contents):
            raise ValueError(
                f"folder must hold Python files for training, validation and test, got no {name} in {root}"
            )
    joined = {name: b"\n".join(contents) for name, contents in parts.items()}
    found = Vocabulary.fit(joined["train"], vocabulary)
    return Text(
        *(found.encode(joined[name]) for name in SPLITS),
        files=(len(parts["train"]), len(parts["validation"]), len(parts["test"])),
        sha256=hashlib.sha256(b"\0".join(joined.values())).hexdigest(),
        lengths=torch.tensor([len(piece) for piece in found.pieces]),
    )


def _split_of(name: str) -> str:
    value = hashlib.sha256(name.encode()).digest()[0]
    return "validation" if value < _HELD_OUT else "test" if value < 2 * _HELD_OUT else "train"


def pieces(text: Int[Tensor, "ids"], count: int, length: int) -> Int[Tensor, "{count} {length}+1"]:
    """Cuts pieces at even distances, for an evaluation that is the same at every call; see `gather`."""
    starts = torch.linspace(0, len(text) - length - 1, count, dtype=torch.float64).long()
    return gather(text, starts, length)


def gather(text: Int[Tensor, "ids"], starts: Int[Tensor, "n"], length: int) -> Int[Tensor, "n {length}+1"]:
    """Cuts the pieces of a length that start at given places, with one token more for the last target."""
    return text[starts.unsqueeze(1) + torch.arange(length + 1)].long()
