"""The emulated model's words: what a token spells and which topic it belongs to. No experts, no I/O.

Token ids are laid out in contiguous ranges: id 0 is the end-of-sequence token (it spells nothing), then the common
words that every domain uses, then one range for each (domain, topic). A word is two or three syllables, so that text
survives any round trip through HTTP and every token is one ASCII word.
"""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

EOS = 0
COMMON = 0
_SYLLABLES = tuple(c + v for c in "bdfgjklmnprstvwz" for v in "aeiou")


def _spell(token: int) -> str:
    base = len(_SYLLABLES)
    word = _SYLLABLES[token % base] + _SYLLABLES[token // base % base]
    return word if token < base * base else word + _SYLLABLES[token // base**2 % base]


class Vocabulary:
    """Words of ``size`` tokens over ``domains`` x ``topics`` topics; group 0 is the common words.

    starts: int64 [groups + 1], the first id of each group (``starts[-1] == size``); the group of (domain, topic) is
    ``1 + domain * topics + topic``. Raises ValueError if the sizes leave a group without words.
    """

    def __init__(self, size: int = 8192, domains: int = 4, topics: int = 6, common: float = 0.2) -> None:
        if size > len(_SYLLABLES) ** 3:
            raise ValueError(f"vocabulary size {size}: at most {len(_SYLLABLES) ** 3} words can be spelled")
        self.size, self.domains, self.topics = size, domains, topics
        self.groups = 1 + domains * topics
        n_common = int(size * common)
        edges = 1 + n_common + (size - 1 - n_common) * np.arange(self.groups) // (self.groups - 1)
        self.starts: NDArray[np.int64] = np.concatenate(([1], edges)).astype(np.int64)
        if (np.diff(self.starts) < 1).any():
            raise ValueError(f"vocabulary size {size}: too small for {self.groups} groups")
        self.words = ["", *(_spell(t) for t in range(1, size))]
        self._ids = {w: t for t, w in enumerate(self.words) if w}

    def group(self, domain: int, topic: int) -> int:
        """The group number of a topic."""
        return 1 + domain * self.topics + topic

    def groups_of(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """The group of each token, int64 [n]; EOS counts as a common word."""
        return np.maximum(np.searchsorted(self.starts, tokens, side="right") - 1, 0)

    def draw(self, mix: NDArray[np.float64], n: int, rng: np.random.Generator) -> NDArray[np.int32]:
        """n tokens: a group by the weights ``mix`` [groups] (need not sum to 1), then a word of it uniformly."""
        # One row of randoms a token: the first m of n tokens are the same for any n >= m.
        u = rng.random((n, 2))
        edges = np.cumsum(mix)
        group = np.searchsorted(edges, u[:, 0] * edges[-1], side="right")
        start = self.starts[group]
        tokens: NDArray[np.float64] = start + u[:, 1] * (self.starts[group + 1] - start)
        return tokens.astype(np.int32)

    def encode(self, text: str) -> list[int]:
        """Token ids of whitespace-separated words; a word that is not in the vocabulary hashes into it."""
        ids, last = self._ids, self.size - 1
        return [t if (t := ids.get(w)) is not None else 1 + zlib.crc32(w.encode()) % last for w in text.split()]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, words separated by one space."""
        return " ".join(w for t in tokens if (w := self.words[t]))


@functools.cache
def vocabulary(size: int, domains: int, topics: int, common: float) -> Vocabulary:
    """The shared Vocabulary of these sizes."""
    return Vocabulary(size, domains, topics, common)
