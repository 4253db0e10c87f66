# SPDX-License-Identifier: Apache-2.0
"""The text that is learnt: the sources of Python's standard library, split by file, as ids of bytes or of byte pairs.

Legend: V ids.
"""

import hashlib
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

BYTES = 128
"""The first ids are ASCII's bytes."""
# Merges stay within words, numbers, runs of signs and white space, so that a corpus is a table of short words.
_WORDS = re.compile(rb" ?[A-Za-z_]+|[0-9]+| ?[^\sA-Za-z0-9_]+|\s+")

Pair = tuple[int, int]


class Vocabulary:
    """Ids for pieces of text: the bytes, then the pairs of ids that training text repeats most.

    A new id stands for the pair of neighbouring ids that occurs most often within words, as the ids so far divide the
    text; ties go to the smaller pair. Text is divided by the same replacements in the same order.

    Example:
        >>> vocabulary = Vocabulary.fit(b"ab abab abab", 130)
        >>> vocabulary.pieces[128:]
        [b'ab', b' ab']
        >>> vocabulary.encode(b"abab ba").tolist()
        [128, 128, 32, 98, 97]

    References:
        Sennrich, Haddow, Birch, Neural machine translation of rare words with subword units (2016).
    """

    def __init__(self, merges: Sequence[Pair]) -> None:
        """Keeps the pairs that are replaced, the most frequent first; the first has id 128."""
        self.merges = list(merges)
        self.pieces = [bytes([i]) for i in range(BYTES)]
        for left, right in self.merges:
            self.pieces.append(self.pieces[left] + self.pieces[right])
        self._ranks = {pair: BYTES + number for number, pair in enumerate(self.merges)}

    def __len__(self) -> int:
        """Returns V."""
        return len(self.pieces)

    @classmethod
    def fit(cls, text: bytes, size: int) -> "Vocabulary":
        """Finds the pairs of an ASCII text; fewer than `size` ids, where it has no pair left that occurs twice."""
        counts = Counter(_WORDS.findall(text)) if size > BYTES else Counter[bytes]()
        words, times = [list(word) for word in counts], list(counts.values())
        pairs: Counter[Pair] = Counter()
        where: defaultdict[Pair, set[int]] = defaultdict(set)
        changed: Iterable[int] = range(len(words))
        merges: list[Pair] = []
        while True:
            for number in changed:
                for pair in pairwise(words[number]):
                    pairs[pair] += times[number]
                    where[pair].add(number)
            pairs = +pairs  # without those that are gone
            best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
            if best is None or pairs[best] < 2 or BYTES + len(merges) >= size:
                return cls(merges)
            changed = where.pop(best)
            for number in changed:
                for pair in pairwise(words[number]):
                    pairs[pair] -= times[number]
                words[number] = _replace(words[number], best, BYTES + len(merges))
            merges.append(best)

    def encode(self, text: bytes) -> Int[Tensor, "ids"]:
        """Divides an ASCII text; returns the ids of its pieces."""
        if not self.merges:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16)
        encode = cache(self._encode_word)
        return torch.tensor([i for word in _WORDS.findall(text) for i in encode(word)], dtype=torch.int16)

    def _encode_word(self, text: bytes) -> list[int]:
        word = list(text)
        while len(word) > 1:
            best = min(pairwise(word), key=lambda pair: self._ranks.get(pair, len(self.pieces)))
            if best not in self._ranks:
                break
            word = _replace(word, best, self._ranks[best])
        return word


def _replace(word: list[int], pair: Pair, new: int) -> list[int]:
    """Puts an id in place of a pair, from the left."""
    replaced: list[int] = []
    for i in word:
        if replaced and i == pair[1] and replaced[-1] == pair[0]:
            replaced[-1] = new
        else:
            replaced.append(i)
    return replaced


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
    files: tuple[int, ...]  # of each split
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

    None is the standard library of this Python. 5% of the files each are for validation and test; a ValueError says
    that a split has none. With more than 128 ids, the bytes, there are pairs of ids that the training split repeats.
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
        files=tuple(map(len, parts.values())),
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
