"""The emulated mixture-of-experts model: which experts a token selects, what a prompt is continued with. No timing.

Calibration. Every token id selects a fixed top-k of experts in each layer, drawn by Gumbel top-k from logits that add
a part common to all tokens (generalist experts), one of the token's domain and one of its topic, each normal with
the standard deviation given in ModelSpec. The defaults reproduce what the ELDR paper (arXiv 2607.00466) measures on
real models: a batch of one domain activates 17-25 % fewer experts than a mixed one, and over requests a prefill's
expert frequencies predict the decode's with a correlation of 0.7-0.9 (tests/loadgen/test_model.py holds both).
Nothing in it knows of routers or partitions.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.vocabulary import EOS, Vocabulary, vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS_A_PASS = 512
_LENGTH_MEDIAN, _LENGTH_SIGMA, _LENGTH_MAX = 90.0, 0.6, 1000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Size and statistics of an emulated model. layers x experts, top_k picks a token and layer; ``general``,
    ``domain`` and ``topic`` are standard deviations of the expert logits' parts; block_size: tokens of a KV block."""

    name: str = "emulated-moe"
    vocab: int = 8192
    domains: int = 4
    topics: int = 6
    common: float = 0.2
    layers: int = 8
    experts: int = 128
    top_k: int = 8
    block_size: int = 32
    max_model_len: int = 8192
    general: float = 0.7
    domain: float = 2.5
    topic: float = 0.8
    seed: int = 0

    @property
    def width(self) -> int:
        """Cells of one count row: layers * experts."""
        return self.layers * self.experts

    @property
    def fingerprint(self) -> int:
        """64-bit identity: equal specs select equal experts."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=8).digest(), "big")


class EmulatedMoE:
    """The model of a spec. cells: int32 [vocab, layers * top_k], the flat cells ``layer * experts + expert`` that a
    token selects."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.vocabulary: Vocabulary = vocabulary(spec.vocab, spec.domains, spec.topics, spec.common)
        self.cells = _cells(spec, self.vocabulary)
        self._mask = np.zeros(spec.width, np.bool_)

    def counts(self, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
        """How many of the tokens select each cell: int64 [layers * experts]."""
        return np.bincount(self.cells[tokens].ravel(), minlength=self.spec.width)

    def block_counts(self, tokens: NDArray[np.int32]) -> NDArray[np.uint8] | NDArray[np.uint16]:
        """Counts of each whole block of ``tokens`` (a multiple of block_size): [blocks, layers * experts], uint8 for
        blocks below 256 tokens, else uint16."""
        n = len(tokens) // self.spec.block_size
        rows = (
            self.cells[tokens].reshape(n, self.spec.block_size * self.cells.shape[1])
            + np.arange(n)[:, None] * self.spec.width
        )
        counts = np.bincount(rows.ravel(), minlength=n * self.spec.width).reshape(n, self.spec.width)
        return counts.astype(np.uint8) if self.spec.block_size < 256 else counts.astype(np.uint16)

    def active(self, tokens: NDArray[np.int32]) -> float:
        """Distinct experts that a decode step over these input tokens reads, mean a layer."""
        self._mask[self.cells[tokens]] = True
        n = int(np.count_nonzero(self._mask))
        self._mask[:] = False
        return n / self.spec.layers

    def continue_prompt(
        self, prompt: NDArray[np.int32], max_tokens: int, min_tokens: int, ignore_eos: bool, seed: int
    ) -> list[int]:
        """Up to ``max_tokens`` tokens that follow a prompt, drawn from the prompt's own mix of topics.

        The same arguments give the same tokens in every process. The continuation ends with EOS after a natural
        length (lognormal), not before ``min_tokens``; with ``ignore_eos`` it has max_tokens tokens.
        """
        digest = hashlib.blake2b(prompt.tobytes() + seed.to_bytes(8, "little", signed=True), digest_size=16).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        natural = int(min(rng.lognormal(np.log(_LENGTH_MEDIAN), _LENGTH_SIGMA) + 1, _LENGTH_MAX))
        mix = np.bincount(self.vocabulary.groups_of(prompt), minlength=self.vocabulary.groups).astype(np.float64)
        tokens: list[int] = self.vocabulary.draw(mix, max_tokens, rng).tolist()
        end = max(natural, min_tokens + 1)
        return tokens if ignore_eos or end > max_tokens else [*tokens[: end - 1], EOS]


def _cells(spec: ModelSpec, words: Vocabulary) -> NDArray[np.int32]:
    rng = np.random.default_rng(spec.seed)
    shape = (spec.layers, spec.experts)
    general = rng.normal(0, spec.general, shape)
    domain = rng.normal(0, spec.domain, (spec.domains, 1, *shape))
    topic = rng.normal(0, spec.topic, (spec.domains, spec.topics, *shape))
    logits = np.concatenate((general[None], (general + domain + topic).reshape(-1, *shape)))
    group = words.groups_of(np.arange(spec.vocab, dtype=np.int32))
    cells = np.empty((spec.vocab, spec.layers, spec.top_k), np.int32)
    for a in range(0, spec.vocab, _ROWS_A_PASS):
        g = group[a : a + _ROWS_A_PASS]
        noisy = logits[g] + rng.gumbel(size=(len(g), *shape))
        cells[a : a + _ROWS_A_PASS] = np.argpartition(-noisy, spec.top_k, axis=-1)[..., : spec.top_k]
    cells += np.arange(spec.layers, dtype=np.int32)[None, :, None] * spec.experts
    return cells.reshape(spec.vocab, -1)


@functools.lru_cache(maxsize=4)
def load(spec: ModelSpec) -> EmulatedMoE:
    """The shared model of a spec (building the default one takes about half a second)."""
    return EmulatedMoE(spec)
