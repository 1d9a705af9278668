"""The hook of an emulated worker: pushes the frames eldrd-vllm-hook pushes, over a ZMQ DEALER. No counting of
its own: rows come from the emulated model.

As the real hook it sends, on a prefill worker, blocks that were computed (never cached ones), then the request's record
if the request has an ``eldr_id``; on a decode worker what such a request generated, and once a second the totals of the
steps. It says hello on connect, every few
seconds and when asked ``who``, and answers ``want`` from a bounded store of recent rows. A full socket drops the message
and counts it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, cast

import numpy as np
import zmq
import zmq.asyncio

from eldrd.signatures import wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.fleet.decode import Step
    from loadgen.fleet.model import EmulatedMoE

_HELLO_EVERY_S = 5.0
_STEPS_EVERY_S = 1.0
_ROWS_KEPT = 16_384
_SEND_QUEUE = 10_000


class EmulatedHook:
    """sent, dropped: messages; lost_rows: rows that a ``want`` named and that were gone."""

    def __init__(self, model: EmulatedMoE, worker: str, endpoint: str, phase: str = "prefill") -> None:
        self.sent = self.dropped = self.lost_rows = 0
        self._model, self._endpoint = model, endpoint
        spec = model.spec
        self._dtype = "u1" if spec.block_size < 256 else "u2"
        self._rows: OrderedDict[int, NDArray[np.generic]] = OrderedDict()
        self._seq = 0
        self._steps = self._requests = self._active = self._told = 0
        self._hello = wire.Hello(
            v=wire.VERSION,
            hook="emulated",
            worker=worker,
            phase=phase,
            model=spec.name,
            fingerprint=spec.fingerprint,
            layers=list(range(spec.layers)),
            experts=spec.experts,
            top_k=spec.top_k,
            block_size=spec.block_size,
            hash_algo="sha256",
        )
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)

    async def run(self) -> None:
        """Connect and serve until cancelled, then close the socket."""
        self._socket.connect(self._endpoint)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._say_hello())
                tasks.create_task(self._answer())
                tasks.create_task(self._tell_steps())
        finally:
            self._socket.close(linger=0)
            self._context.term()

    def prefilled(self, eldr_id: str | None, prompt: NDArray[np.int32], hashes: list[int], computed_from: int) -> None:
        """Push the new blocks of a prompt whose tokens from ``computed_from`` on were computed, and its record."""
        size = self._model.spec.block_size
        full = len(hashes) * size
        if computed_from < full:
            new = hashes[computed_from // size :]
            rows = self._model.block_counts(prompt[computed_from:full])
            self._remember(new, rows)
            self._push_blocks(new, rows)
        if eldr_id is not None:
            header = wire.Request(
                v=wire.VERSION,
                seq=self._next(),
                id=eldr_id,
                tokens=len(prompt),
                blocks=len(hashes),
                tail=len(prompt) - full,
                partial=False,
                dtype=self._dtype,
            )
            tail = self._model.counts(prompt[full:])
            self._push(wire.encode(header, np.array(hashes, wire.HASH), tail.astype(f"<{self._dtype}")))

    def decoded(self, eldr_id: str, output: list[int]) -> None:
        """Push the counts of what a request generated: all tokens but the last, which no step ran through the model."""
        tokens = np.array(output[:-1], np.int32)
        header = wire.Decoded(v=wire.VERSION, seq=self._next(), id=eldr_id, tokens=len(tokens), dtype="u4")
        self._push(wire.encode(header, self._model.counts(tokens).astype(wire.DTYPES["u4"])))

    def stepped(self, step: Step) -> None:
        """Count a decode step; prompts are never mixed in here."""
        self._steps += 1
        self._requests += step.batch
        self._active += round(step.active * self._model.spec.layers)

    def _remember(self, hashes: list[int], rows: NDArray[np.generic]) -> None:
        for h, row in zip(hashes, rows, strict=True):
            self._rows[h] = row
        while len(self._rows) > _ROWS_KEPT:
            self._rows.popitem(last=False)

    def _push_blocks(self, hashes: list[int], rows: NDArray[np.generic]) -> None:
        header = wire.Blocks(v=wire.VERSION, seq=self._next(), n=len(hashes), dtype=self._dtype)
        self._push(wire.encode(header, np.array(hashes, wire.HASH), rows))

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _push(self, frames: list[bytes]) -> None:
        # With DONTWAIT the future is done when it is returned: sent, or the queue was full.
        sent = cast("asyncio.Future[object]", self._socket.send_multipart(frames, flags=zmq.DONTWAIT))
        if sent.exception() is None:
            self.sent += 1
        else:
            self.dropped += 1

    async def _say_hello(self) -> None:
        while True:
            self._push(wire.encode(self._hello))
            await asyncio.sleep(_HELLO_EVERY_S)

    async def _tell_steps(self) -> None:
        while True:
            await asyncio.sleep(_STEPS_EVERY_S)
            if self._told != self._steps:
                self._told = self._steps
                totals = (self._steps, self._requests, self._requests, self._active, 0)
                self._push(wire.encode(wire.Steps(wire.VERSION, self._next(), *totals)))

    async def _answer(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            header = wire.decode_header(frames[0])
            if isinstance(header, wire.Who):
                self._push(wire.encode(self._hello))
            elif isinstance(header, wire.Want):
                wanted = wire.hashes(frames, header.n).tolist()
                found = [h for h in wanted if h in self._rows]
                self.lost_rows += len(wanted) - len(found)
                if found:
                    self._push_blocks(found, np.stack([self._rows[h] for h in found]))
