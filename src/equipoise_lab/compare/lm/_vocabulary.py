# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of byte pairs: ids that say more than a byte does.

Legend: V ids.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

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
        for number, word in enumerate(words):
            for pair in pairwise(word):
                pairs[pair] += times[number]
                where[pair].add(number)
        merges: list[Pair] = []
        while BYTES + len(merges) < size and pairs:
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            if pairs[best] < 2:
                break
            merges.append(best)
            for number in where.pop(best):
                word = words[number]
                for pair in pairwise(word):
                    pairs[pair] -= times[number]
                words[number] = word = _replace(word, best, BYTES + len(merges) - 1)
                for pair in pairwise(word):
                    pairs[pair] += times[number]
                    where[pair].add(number)
            pairs = +pairs  # without those that are gone
        return cls(merges)

    def encode(self, text: bytes) -> Int[Tensor, "ids"]:
        """Divides an ASCII text; returns the ids of its pieces."""
        if not self.merges:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16)
        known: dict[bytes, list[int]] = {}
        ids: list[int] = []
        for word in _WORDS.findall(text):
            if word not in known:
                known[word] = self._encode_word(list(word))
            ids += known[word]
        return torch.tensor(ids, dtype=torch.int16)

    def _encode_word(self, word: list[int]) -> list[int]:
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
