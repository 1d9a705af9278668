"""KV blocks of one emulated worker: block hashes, prefix cache, allocation. No requests, no timing."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

_SEED = hashlib.sha256(b"vllm-none-hash").digest()


def block_hashes(prompt: NDArray[np.int32], block_size: int, salt: str = "") -> list[int]:
    """Hash of each full block: the low 64 bits of sha256(parent, tokens), chained as vLLM does
    (v1/core/kv_cache_utils.py hash_block_tokens), though over other bytes; ``salt`` enters the first block."""
    parent = hashlib.sha256(_SEED + salt.encode()).digest()
    out = []
    for a in range(0, len(prompt) - block_size + 1, block_size):
        parent = hashlib.sha256(parent + prompt[a : a + block_size].tobytes()).digest()
        out.append(int.from_bytes(parent[-8:], "big"))
    return out


class BlockPool:
    """``capacity`` KV blocks with a prefix cache over the unreferenced ones, least recently used first out.

    Blocks are registered under their hash when they are allocated, as in vLLM, so a second request finds the prefix
    of one that is still being computed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, capacity + 1))
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def usage(self) -> float:
        """Share of blocks that somebody holds, 0..1 (vllm:kv_cache_usage_perc)."""
        return len(self._refs) / self.capacity

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks are cached."""
        for i, h in enumerate(hashes):
            if h not in self._block_of:
                return i
        return len(hashes)

    def allocate(self, hashes: Sequence[int], cached: int, total: int) -> list[int] | None:
        """Hold ``total`` blocks: the first ``cached`` from the cache, the rest fresh, registering ``hashes`` on theirs.
        None, and nothing held, if too few are free."""
        reused = [self._block_of[h] for h in hashes[:cached]]
        if total - cached > len(self._idle) - sum(b in self._idle for b in reused):
            return None
        for b in reused:
            self._idle.pop(b, None)
            self._refs[b] = self._refs.get(b, 0) + 1
        fresh = [self._take() for _ in range(total - cached)]
        for b, h in zip(fresh, hashes[cached:], strict=False):
            # First write wins: a recomputed block does not replace the cached copy of the same hash.
            if h not in self._block_of:
                self._block_of[h], self._hash_of[b] = b, h
        return reused + fresh

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold of each block; blocks nobody holds stay cached until reused. Tail blocks go first."""
        for b in reversed(blocks):
            if self._refs[b] == 1:
                del self._refs[b]
                self._idle[b] = None
            else:
                self._refs[b] -= 1

    def reset(self) -> bool:
        """Forget all cached blocks; refused (False) while any block is held, as in vLLM."""
        if self._refs:
            return False
        self._block_of.clear()
        self._hash_of.clear()
        return True

    def _take(self) -> int:
        block, _ = self._idle.popitem(last=False)
        if (h := self._hash_of.pop(block, None)) is not None:
            del self._block_of[h]
        self._refs[block] = 1
        return block
