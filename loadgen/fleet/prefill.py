"""The prefill queue of an emulated worker: one prompt at a time, time linear in uncached tokens. No HTTP, no decode."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.fleet.kv import BlockPool
    from loadgen.fleet.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds a prefill takes: base_s + per_token_s * uncached tokens."""

    base_s: float = 0.006
    per_token_s: float = 0.00008

    def __call__(self, tokens: int) -> float:
        return self.base_s + self.per_token_s * tokens


class Hook(Protocol):
    """What counts computed tokens; see loadgen.fleet.hook."""

    def prefilled(self, eldr_id: str | None, prompt: NDArray[np.int32], hashes: list[int], computed_from: int) -> None:
        """A prompt's tokens from position ``computed_from`` (a block boundary) on have been computed."""


class PrefillQueue:
    """First come, first served; a prompt waits at the head until the pool has room for it, as in vLLM.

    current: the sequence being computed; queries, hits: prompt tokens looked up and found in the prefix cache;
    done(seq) is called when a prompt has been computed, before which the hook has seen its tokens.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, cost: PrefillCost, hook: Hook | None, done: Callable[[Sequence], None]
    ) -> None:
        self.queries = self.hits = 0
        self._pool, self._block_size, self._cost, self._hook, self._done = pool, block_size, cost, hook, done
        self._waiting: deque[Sequence] = deque()
        self.current: Sequence | None = None
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return int(self.current is not None)

    def add(self, seq: Sequence) -> None:
        self._waiting.append(seq)
        self._wake.set()

    def discard(self, seq: Sequence) -> None:
        """Forget a waiting sequence; one that is being computed is finished first."""
        if seq in self._waiting:
            self._waiting.remove(seq)

    def room(self) -> None:
        """Blocks were released."""
        self._wake.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        free_at = loop.time()
        while True:
            seq = self._admit()
            if seq is None:
                self._wake.clear()
                await self._wake.wait()
                free_at = loop.time()
                continue
            self.current = seq
            free_at = max(free_at, loop.time() - 0.005) + self._cost(len(seq.prompt) - seq.cached_tokens)
            await asyncio.sleep(free_at - loop.time())
            self.current = None
            if self._hook is not None:
                self._hook.prefilled((seq.params or {}).get("eldr_id"), seq.prompt, seq.hashes, seq.cached_tokens)
            seq.advance()
            self._done(seq)

    def _admit(self) -> Sequence | None:
        if not self._waiting:
            return None
        seq = self._waiting[0]
        # At least the last token must be computed, so a fully cached aligned prompt recomputes its last block.
        cached = min(self._pool.match(seq.hashes), (len(seq.prompt) - 1) // self._block_size)
        blocks = self._pool.allocate(seq.hashes, cached, seq.blocks_needed(self._block_size))
        if blocks is None:
            return None
        self._waiting.popleft()
        seq.blocks, seq.cached_tokens = blocks, cached * self._block_size
        self.queries += len(seq.prompt)
        self.hits += seq.cached_tokens
        return seq
