"""Gives hand-offs back that no decode worker will use, and sees prefill legs through whose client has gone.

A prefill worker holds a finished prompt's KV until a decode worker tells it that it has it. vLLM's decode server tells so
as well for a request that it refuses before the engine sees it (vllm/entrypoints/generate/base/serving.py,
_with_kv_transfer_rejection_cleanup). So a request for a model that does not exist, with the hand-off, frees the prefill
worker's blocks without moving or computing anything. Never used once a decode worker may have begun to read the blocks.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Final

import numpy as np
import orjson

from eldrd.fleet import vllm
from eldrd.fleet.connection import UpstreamError
from eldrd.routing.load import ShortestQueue
from eldrd.routing.policy import NoWorkerError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from eldrd.fleet.connection import Connection
    from eldrd.fleet.table import Lease
    from eldrd.fleet.worker import Worker
    from eldrd.handoff.ledger import HandOff, Ledger
    from eldrd.handoff.snapshot import Snapshot

# A prefill that ends soon after its client left is seen through, so that its KV can be given back; one that goes on is
# ended, which makes vLLM free its blocks.
GRACE_S: Final = 0.25
# How long an answer may be on its way.
_LAST_S: Final = 1.0
_RELEASE_S: Final = 5.0
_ANSWER_LIMIT: Final = 1 << 20


class Releaser:
    """Background tasks of one daemon; each ends within seconds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._least_loaded = ShortestQueue()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def release(self, hand_off: HandOff, snap: Snapshot) -> None:
        """Free the prefill worker's blocks through a decode worker of the snapshot; the entry ends as released or lost."""
        if hand_off.outcome is None and not hand_off.releasing:
            hand_off.releasing = True
            self._spawn(self._release(hand_off, snap))

    def adopt(self, connection: Connection, id_: str, worker: Worker, lease: Lease, snap: Snapshot) -> None:
        """Take over a prefill exchange whose client is gone; ``lease`` ends with it."""
        self._spawn(self._adopt(connection, id_, worker, lease, snap))

    async def close(self, timeout_s: float) -> None:
        """Wait for what is under way, then drop it."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, hand_off: HandOff, snap: Snapshot) -> None:
        connection: Connection | None = None
        try:
            usable = snap.decode.usable()
            # One that has never read from that engine passes the release on with its next real work only.
            met = usable & np.array([hand_off.engine in w.met for w in snap.decode.workers])
            row = self._least_loaded.choose(snap.decode.in_flight(), met if met.any() else usable, None).worker
            pool = snap.decode.workers[row].pool
            connection = await pool.get()
            body = vllm.release_body(hand_off.params)
            head = vllm.post("/v1/completions", pool.netloc, hand_off.id, len(body), snap.worker_headers)
            answer = await connection.send([head, body], _RELEASE_S)
            await connection.collect(_RELEASE_S, _ANSWER_LIMIT)
            # A server that knows such a model has used the hand-off up, which frees the blocks just as well.
            hand_off.end("released" if answer.status in (200, 400, 404) else "lost")
        except (UpstreamError, NoWorkerError):
            pass
        finally:
            # Only the first outcome counts.
            hand_off.end("lost")
            if connection is not None:
                connection.release()

    async def _adopt(self, connection: Connection, id_: str, worker: Worker, lease: Lease, snap: Snapshot) -> None:
        try:
            try:
                status, body = await _answer(connection, GRACE_S)
            except TimeoutError:
                transport = connection.transport
                if transport is None or transport.is_closing() or not transport.can_write_eof():
                    raise
                # P sees that nobody waits, and an answer that was on its way by then can still be read.
                transport.write_eof()
                status, body = await _answer(connection, _LAST_S)
            else:
                connection.release()
            answer = orjson.loads(body) if status == 200 else {}
            params = vllm.transfer_params(answer) if isinstance(answer, dict) else None
            if params is not None:
                hand_off = self._ledger.open(id_, worker.name, params, monotonic())
                self.release(hand_off, snap)
        except (UpstreamError, TimeoutError, orjson.JSONDecodeError):
            pass
        finally:
            if not connection.idle:
                connection.abort()
            lease.end()


async def _answer(connection: Connection, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of an exchange whose request was sent. Raises TimeoutError or UpstreamError."""
    # The connection's own limit must not be the first: it would close.
    limit_s = timeout_s + 1
    async with asyncio.timeout(timeout_s):
        head = await connection.head(limit_s)
        return head.status, await connection.collect(limit_s, vllm.MAX_ANSWER)
