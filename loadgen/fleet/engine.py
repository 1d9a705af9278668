"""The engine of one emulated vLLM server: KV, queues, hand-offs, hook. No HTTP.

Roles: ``prefill`` (has the hook), ``decode``, ``plain``. As with real vLLM the role only decides what is attached; any
worker prefills a request that brings no KV and decodes as far as it is asked. One simplification: prefill and decode of
one worker do not slow each other down, which matters to plain workers only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadgen.fleet.decode import DecodeLoop, StepCost
from loadgen.fleet.handoff import Fabric, HandoffError, Ledger
from loadgen.fleet.hook import EmulatedHook
from loadgen.fleet.kv import BlockPool
from loadgen.fleet.prefill import PrefillCost, PrefillQueue

if TYPE_CHECKING:
    from loadgen.fleet.model import EmulatedMoE
    from loadgen.fleet.sequence import Sequence


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """name; role; hook: ZMQ endpoint of eldrd, None = no hook; port 0 = any free one;
    transfer_s: time D needs to fetch a hand-off; lease_s: how long P keeps one; kv_blocks: size of the KV cache;
    keepalive_s: idle connections are closed after this (uvicorn's default); journal: what was answered is kept."""

    name: str
    role: str = "plain"
    host: str = "127.0.0.1"
    port: int = 0
    hook: str | None = None
    kv_blocks: int = 8192
    max_num_seqs: int = 256
    lease_s: float = 30.0
    transfer_s: float = 0.003
    keepalive_s: float = 5.0
    journal: bool = False
    prefill: PrefillCost = field(default_factory=PrefillCost)
    decode: StepCost = field(default_factory=StepCost)


class Engine:
    """Everything that dies with the process: KV, queues, hand-offs, hook."""

    def __init__(self, spec: WorkerSpec, model: EmulatedMoE, fabric: Fabric, side_port: int) -> None:
        self.pool = BlockPool(spec.kv_blocks)
        self.ledger = Ledger(spec.host, side_port, spec.lease_s)
        phase = "decode" if spec.role == "decode" else "prefill"
        self.hook = EmulatedHook(model, spec.name, spec.hook, phase) if spec.hook else None
        counts_prompts = self.hook if phase == "prefill" else None
        self.finished: Counter[str] = Counter()
        self.local_prefills = 0
        self._spec, self._fabric = spec, fabric
        self.prefill = PrefillQueue(self.pool, model.spec.block_size, spec.prefill, counts_prompts, self._prefilled)
        stepped = self.hook.stepped if self.hook is not None and phase == "decode" else None
        self.decode = DecodeLoop(model, self.pool, spec.decode, spec.max_num_seqs, self._finish, stepped)
        fabric.join(self.ledger)
        self._tasks = [asyncio.create_task(self.prefill.run()), asyncio.create_task(self.decode.run())]
        if self.hook is not None:
            self._tasks.append(asyncio.create_task(self.hook.run()))

    def submit(self, seq: Sequence) -> None:
        if not (seq.params or {}).get("do_remote_prefill"):
            self.local_prefills += 1
            self.prefill.add(seq)
            return
        try:
            self._fabric.claim(self._spec.name, seq)
        except HandoffError:
            self.finished["error"] += 1
            seq.fail("Internal server error")
            return
        asyncio.get_running_loop().call_later(self._spec.transfer_s, self._arrived, seq)

    def reject(self, params: dict[str, Any] | None) -> None:
        """A request that brought KV has ended before the engine saw it."""
        if params and params.get("do_remote_prefill"):
            self._fabric.release(params)

    def abort(self, seq: Sequence) -> None:
        """The client is gone."""
        if seq.done or seq.aborted:
            return
        seq.aborted = True
        self.finished["abort"] += 1
        self.prefill.discard(seq)
        self.decode.discard(seq)
        self._release(seq)

    async def stop(self) -> None:
        self._fabric.leave(self.ledger)
        self.ledger.close()
        for t in self._tasks:
            t.cancel()
        for t in self._tasks:
            with suppress(asyncio.CancelledError):
                await t

    def _arrived(self, seq: Sequence) -> None:
        if not seq.aborted:
            self.decode.add(seq)

    def _prefilled(self, seq: Sequence) -> None:
        if seq.aborted:
            self._release(seq)
        elif seq.done:
            self._finish(seq)
        else:
            self.decode.add(seq)

    def _finish(self, seq: Sequence) -> None:
        self.finished[seq.output.finish_reason] += 1
        params = seq.params or {}
        if params.get("do_remote_decode"):
            seq.hand_off = self.ledger.pin(seq, lambda: self._release(seq))
            if self.hook is not None and "eldr_id" in params:
                seq.hand_off["eldr"] = {"id": params["eldr_id"], "blocks": len(seq.hashes)}
        else:
            if self.hook is not None and self._spec.role == "decode" and "eldr_id" in params:
                self.hook.decoded(params["eldr_id"], seq.output.tokens)
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        if seq is self.prefill.current:
            return  # still being computed; its end releases it
        self.pool.release(seq.blocks)
        seq.blocks = []
        self.prefill.room()
        self.decode.room()
