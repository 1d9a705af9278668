"""vLLM's KV cache events: rows of blocks that no prefill server holds any more leave the cache. Counts nothing itself.

A prefill server publishes what its prefix cache stores and removes (vllm/distributed/kv_events.py: PUB, frames topic,
sequence number, msgpack batch) when it runs with --kv-events-config. Each copy of a block is stored and removed on its
own, so copies are counted by server; a row goes when the last copy at the last server went. Events and the hook's rows
come by different sockets in no order: a row is removed only ``DELAY_S`` after its block, and not if the block was stored
again by then. Lost events cannot make a signature wrong: a row too many is evicted in time, a row too few is asked for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

import msgspec
import numpy as np
import structlog
import zmq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from eldrd.signatures.cache import SignatureCache
    from eldrd.signatures.geometry import Geometry
    from eldrd.telemetry.metrics import Metrics

log = structlog.get_logger()

DELAY_S: Final = 0.5
# Batches taken, and hashes looked up, in one turn of the loop.
_BURST: Final = 32
_SWEEP: Final = 4096


class BlockStored(msgspec.Struct, tag="BlockStored", frozen=True):
    """Blocks that can be hit from now on. The event's other fields, the prompt's tokens among them, are not decoded."""

    block_hashes: list[int | bytes]


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """Blocks of which one copy cannot be hit any more."""

    block_hashes: list[int | bytes]


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    """The prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[msgspec.Raw]


_batch: msgspec.msgpack.Decoder[_Batch] = msgspec.msgpack.Decoder(_Batch)
_event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


@dataclass(slots=True, eq=False)
class _Server:
    """One prefill server. copies: of each block it holds, about 100 bytes a block."""

    name: str
    endpoint: str
    socket: zmq.Socket[bytes]
    fd: int
    seq: int = -1
    copies: Counter[int] = field(default_factory=Counter)
    again: asyncio.Handle | None = None


class CacheEvents:
    """Follows the prefill servers' events and removes rows from the cache."""

    def __init__(self, cache: SignatureCache, metrics: Metrics, geometry: Callable[[], Geometry | None]) -> None:
        """geometry: what the hooks count now, whose rows the events are about."""
        self._cache, self._geometry = cache, geometry
        self._counted = {k: metrics.kv_events.labels(k) for k in ("stored", "removed", "cleared", "lost", "invalid")}
        self._servers: dict[str, _Server] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._due: deque[tuple[float, list[int]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, endpoints: Mapping[str, str]) -> None:
        """Follow these servers, endpoint by name, and no others: what a server held that is not named any more is gone."""
        for name, server in list(self._servers.items()):
            if endpoints.get(name) != server.endpoint:
                self._forget(server)
        for name, endpoint in endpoints.items():
            if name not in self._servers:
                self._follow(name, endpoint)

    def holds(self, block_hash: int) -> bool:
        """Whether a server holds the block, by the events so far."""
        return any(block_hash in s.copies for s in self._servers.values())

    def close(self) -> None:
        for server in list(self._servers.values()):
            self._forget(server)
        if self._timer is not None:
            self._timer.cancel()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _follow(self, name: str, endpoint: str) -> None:
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        server = self._servers[name] = _Server(name, endpoint, socket, cast("int", socket.getsockopt(zmq.FD)))
        asyncio.get_running_loop().add_reader(server.fd, self._readable, server)
        self._readable(server)

    def _forget(self, server: _Server) -> None:
        del self._servers[server.name]
        asyncio.get_running_loop().remove_reader(server.fd)
        if server.again is not None:
            server.again.cancel()
        server.socket.close()
        self._clear(server)

    # -- events -------------------------------------------------------------------------------------------------------------

    def _readable(self, server: _Server) -> None:
        """ZMQ's descriptor is edge-triggered: take batches until there are none, a burst at a time."""
        server.again = None
        for _ in range(_BURST):
            if not cast("int", server.socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._take(server, server.socket.recv_multipart(zmq.NOBLOCK))
        server.again = asyncio.get_running_loop().call_soon(self._readable, server)

    def _take(self, server: _Server, frames: list[bytes]) -> None:
        try:
            _, number, content = frames
            events = _batch.decode(content).events
        except (ValueError, msgspec.DecodeError):
            self._invalid(server, "not a batch of events")
            return
        self._sequence(server, int.from_bytes(number, "big"))
        for raw in events:
            try:
                event = _event.decode(raw)
            except msgspec.DecodeError as e:  # one of another vLLM's
                self._invalid(server, str(e))
                continue
            if isinstance(event, BlockStored):
                self._counted["stored"].inc(len(event.block_hashes))
                server.copies.update(_low64(event.block_hashes))
            elif isinstance(event, BlockRemoved):
                self._counted["removed"].inc(len(event.block_hashes))
                self._remove(server, _low64(event.block_hashes))
            else:
                self._counted["cleared"].inc()
                self._clear(server)

    def _sequence(self, server: _Server, number: int) -> None:
        if number <= server.seq:
            # A server counts from 0: this is a new one, and its cache was empty.
            self._clear(server)
        elif number > server.seq + 1 and server.seq >= 0:
            self._counted["lost"].inc(number - server.seq - 1)
        server.seq = number

    def _invalid(self, server: _Server, problem: str) -> None:
        self._counted["invalid"].inc()
        log.warning("kv_event_invalid", worker=server.name, problem=problem)

    def _remove(self, server: _Server, hashes: Iterable[int]) -> None:
        gone = []
        for h in hashes:
            left = server.copies.get(h, 0) - 1
            if left > 0:
                server.copies[h] = left
            else:
                server.copies.pop(h, None)
                gone.append(h)
        self._later(gone)

    def _clear(self, server: _Server) -> None:
        self._later(list(server.copies))
        server.copies.clear()

    # -- rows ---------------------------------------------------------------------------------------------------------------

    def _later(self, hashes: list[int]) -> None:
        if not hashes:
            return
        loop = asyncio.get_running_loop()
        each = iter(hashes)
        while part := list(islice(each, _SWEEP)):
            self._due.append((loop.time() + DELAY_S, part))
        if self._timer is None:
            self._timer = loop.call_later(DELAY_S, self._sweep)

    def _sweep(self) -> None:
        """Remove the rows of one lot of blocks that are due, and come again for the next."""
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._due and self._due[0][0] <= loop.time():
            _, hashes = self._due.popleft()
            geometry = self._geometry()
            gone = [h for h in hashes if not self.holds(h)]
            if geometry is not None and gone:
                self._cache.remove(geometry, np.array(gone, np.uint64))
        if self._due:
            self._timer = loop.call_at(max(self._due[0][0], loop.time()), self._sweep)


def _low64(hashes: list[int | bytes]) -> Iterable[int]:
    """Whole hashes (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0) and the integers that vLLM makes of them, as these integers."""
    return (h if isinstance(h, int) else int.from_bytes(h[-8:], "big") for h in hashes)
