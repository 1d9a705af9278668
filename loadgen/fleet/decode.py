"""Continuous batching on an emulated worker: a step takes as long as its distinct experts cost. No HTTP, no prefill.

The step time is base + per_expert * (distinct experts of the batch, mean a layer) + per_request * batch. The paper's
Qwen3-30B-A3B layer (16 -> 128 active experts costs 4.7x, at any batch size) means a fixed part worth 14 experts; the
defaults add attention and overhead to that, and give 20-30 ms a token at 8-24 requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.fleet.kv import BlockPool
    from loadgen.fleet.model import EmulatedMoE
    from loadgen.fleet.sequence import Sequence

_STEPS_KEPT = 200_000
_CATCH_UP_S = 0.005


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds a decode step takes."""

    base_s: float = 0.0055
    per_expert_s: float = 0.00032
    per_request_s: float = 0.00006

    def __call__(self, active: float, batch: int) -> float:
        return self.base_s + self.per_expert_s * active + self.per_request_s * batch


class Step(NamedTuple):
    """t: loop time at its end, seconds; batch: requests; active: distinct experts, mean a layer."""

    t: float
    batch: int
    active: float


class DecodeLoop:
    """The running batch of one worker. A sequence joins and leaves at step boundaries; an aborted one leaves at once.

    steps: the latest steps; done(seq) is called when a sequence has produced its last token, stepped(step) after each step.
    """

    def __init__(
        self,
        model: EmulatedMoE,
        pool: BlockPool,
        cost: StepCost,
        max_num_seqs: int,
        done: Callable[[Sequence], None],
        stepped: Callable[[Step], None] | None = None,
    ) -> None:
        self.steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        self._model, self._pool, self._cost, self._max, self._done = model, pool, cost, max_num_seqs, done
        self._stepped = stepped
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, seq: Sequence) -> None:
        """A sequence whose prompt's KV is here; it brings its blocks or gets them when it is admitted."""
        self._waiting.append(seq)
        self._wake.set()

    def discard(self, seq: Sequence) -> None:
        """Drop a sequence, waiting or running."""
        if seq in self._waiting:
            self._waiting.remove(seq)
        elif seq in self._running:
            self._running.remove(seq)

    def room(self) -> None:
        """Blocks were released."""
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        free_at = loop.time()
        while True:
            self._admit()
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                free_at = loop.time()
                continue
            batch = list(self._running)
            active = self._model.active(np.fromiter((s.next_input for s in batch), np.int32, len(batch)))
            # Timers are coarse (1 ms on uvloop): the next step starts when this one ought to have ended.
            free_at = max(free_at, loop.time() - _CATCH_UP_S) + self._cost(active, len(batch))
            await asyncio.sleep(free_at - loop.time())
            step = Step(free_at, len(batch), active)
            self.steps.append(step)
            if self._stepped is not None:
                self._stepped(step)
            for seq in batch:
                if seq.aborted:
                    continue
                seq.advance()
                if seq.done:
                    self._running.remove(seq)
                    self._done(seq)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max:
            seq = self._waiting[0]
            if not seq.blocks:
                blocks = self._pool.allocate((), 0, seq.blocks_needed(self._model.spec.block_size))
                if blocks is None:
                    return
                seq.blocks = blocks
            self._running.append(self._waiting.popleft())
