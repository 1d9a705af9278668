"""Where the hooks' frames arrive: a ZMQ ROUTER on the loop, the block cache behind it, and the requests that wait.

Chooses no worker and knows no HTTP. A signature leaves here exact, or as partial or missing with the reason.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import structlog
import zmq

from eldrd.signatures import wire
from eldrd.signatures.events import CacheEvents
from eldrd.signatures.steps import StepFigures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eldrd.signatures.cache import SignatureCache
    from eldrd.signatures.geometry import Geometry
    from eldrd.telemetry.metrics import Metrics

log = structlog.get_logger()

_HEARD: Final = ("hello", "blocks", "request", "decoded", "steps")
# Frames taken in one turn of the loop, so that a burst of large ones does not hold it.
_BURST: Final = 32
# Ended requests whose decode counts wait to be taken; the oldest goes.
_DECODED: Final = 1024
# Three times as long as hooks take to say hello again.
_SILENT_S: Final = 15.0
_NO_HASHES: Final = np.empty(0, np.uint64)
_NO_TAIL: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Signature:
    """A request's expert counts: int32 [L * E], over all its prompt tokens when ``state`` is exact."""

    state: str
    counts: NDArray[np.int32]
    tokens: int
    geometry: Geometry
    eldr_id: str = ""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a request generated: counts uint16 or uint32 [L * E] of ``tokens`` tokens, all but the last one."""

    counts: NDArray[np.unsignedinteger[Any]]
    tokens: int
    geometry: Geometry


@dataclass(slots=True)
class _Peer:
    """One hook's connection. seq: its last message number; heard: monotonic time of its last hello."""

    identity: bytes
    hello: wire.Hello
    geometry: Geometry
    heard: float
    seq: int = 0


@dataclass(slots=True)
class _Pending:
    """A request whose signature somebody will ask for."""

    eldr_id: str
    waiter: asyncio.Future[None] | None = None
    signature: Signature | None = None
    # While rows are lacking: what is needed to try again.
    peer: _Peer | None = None
    hashes: NDArray[np.uint64] = field(default_factory=lambda: _NO_HASHES)
    tail: NDArray[np.unsignedinteger[Any]] = field(default_factory=lambda: _NO_TAIL)
    tokens: int = 0

    @property
    def whole(self) -> bool:
        """Whether there is a signature and no row of it is lacking."""
        return self.signature is not None and self.peer is None


class SignatureReceiver:
    """Takes frames, fills the cache, and answers ``wait`` with the signature of an expected request."""

    def __init__(self, cache: SignatureCache, metrics: Metrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._frames = {
            k: metrics.frames.labels(k) for k in (*_HEARD, "unasked", "want", "who", "invalid", "lost", "unlike")
        }
        self.steps = StepFigures(metrics)
        self.events = CacheEvents(cache, metrics, lambda: self.geometry)
        self._peers: dict[bytes, _Peer] = {}
        self._pending: dict[str, _Pending] = {}
        self._lacking: dict[str, _Pending] = {}
        self._decoded: OrderedDict[str, Decoded] = OrderedDict()
        self._socket: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._fd = -1
        self._again: asyncio.Handle | None = None

    @property
    def geometry(self) -> Geometry | None:
        """What the hooks count of prompts: the latest one's word, None before the first hello."""
        peers = [p for p in self._peers.values() if p.hello.phase != "decode"]
        return max(peers, key=lambda p: p.heard).geometry if peers else None

    @property
    def decoding(self) -> bool:
        """Whether a hook counts generated tokens now."""
        since = monotonic() - _SILENT_S
        return any(p.hello.phase != "prefill" and p.heard > since for p in self._peers.values())

    @property
    def hooks(self) -> list[wire.Hello]:
        """The latest hello of each hook, one a worker name."""
        return list({p.hello.worker: p.hello for p in self._peers.values()}.values())

    def start(self, endpoint: str) -> str:
        """Bind and take frames from now on; the bound endpoint (a wildcard port resolved). Raises OSError."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as e:
            socket.close()
            context.term()
            raise OSError(e.errno, f"{endpoint}: {e.strerror}") from None
        self._context, self._socket = context, socket
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._readable)
        self._readable()
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def close(self) -> None:
        self.events.close()
        if self._socket is None or self._context is None:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        if self._again is not None:
            self._again.cancel()
        self._socket.close()
        self._context.term()
        self._socket = None

    def expect(self, eldr_id: str) -> None:
        """A prefill request with this id is about to be sent."""
        self._pending[eldr_id] = _Pending(eldr_id)

    def forget(self, eldr_id: str) -> None:
        """Nobody will ask for this id any more."""
        self._pending.pop(eldr_id, None)
        self._lacking.pop(eldr_id, None)

    def take_decoded(self, eldr_id: str) -> Decoded | None:
        """What the hook of the decode worker counted for a request that ended, once; None if nothing came (yet)."""
        return self._decoded.pop(eldr_id, None)

    async def wait(self, eldr_id: str, timeout_s: float) -> Signature | None:
        """The signature of an expected request, waiting up to ``timeout_s``; None if the hook's record has not come."""
        pending = self._pending[eldr_id]
        # The hook sends its record before P answers, so it is mostly here already, behind a turn of the loop.
        if not pending.whole:
            self._readable()
        if not pending.whole:
            loop = asyncio.get_running_loop()
            pending.waiter = loop.create_future()
            timer = loop.call_later(timeout_s, _wake, pending.waiter)
            try:
                await pending.waiter
            finally:
                timer.cancel()
                pending.waiter = None
            if not pending.whole:
                # A busy loop runs its timers before it reads: what came in time shall count.
                self._readable()
        return pending.signature

    # -- frames ---------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        """ZMQ's descriptor is edge-triggered: take messages until there are none, a burst at a time."""
        self._again = None
        socket = self._socket
        if socket is None:
            return
        for _ in range(_BURST):
            # Asking costs a third of the exception that receiving from an empty socket raises.
            if not cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            identity, *frames = socket.recv_multipart(zmq.NOBLOCK)
            self._message(identity, frames)
        self._again = asyncio.get_running_loop().call_soon(self._readable)

    def _message(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            header = wire.decode_header(frames[0] if frames else b"")
            if isinstance(header, wire.Hello):
                self._hello(identity, header)
                return
            peer = self._peers.get(identity)
            if peer is None:
                self._frames["who"].inc()
                self._send(identity, wire.encode(wire.Who(v=wire.VERSION)))
            elif isinstance(header, wire.Blocks):
                self._sequence(peer, header.seq)
                self._blocks(peer, header, frames)
            elif isinstance(header, wire.Request):
                self._sequence(peer, header.seq)
                self._request(peer, header, frames)
            elif isinstance(header, wire.Decoded):
                self._sequence(peer, header.seq)
                self._take_decoded(peer, header, frames)
            elif isinstance(header, wire.Steps):
                self._sequence(peer, header.seq)
                self._frames["steps"].inc()
                self.steps.take(peer.hello.worker, peer.geometry, header)
            else:
                raise wire.WireError("a frame that only eldrd sends")
        except ValueError as e:
            # Also what the cache refuses: a count that no block can have.
            self._frames["invalid"].inc()
            log.warning("signature_frame_invalid", problem=str(e))

    def _sequence(self, peer: _Peer, seq: int) -> None:
        if peer.seq and seq > peer.seq + 1:
            self._frames["lost"].inc(seq - peer.seq - 1)
        peer.seq = seq

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        self._frames["hello"].inc()
        known = self._peers.get(identity)
        if known is not None and known.hello == hello:
            known.heard = monotonic()
            return
        geometry = hello.geometry()
        if min(geometry.shape) < 1 or not 1 <= geometry.top_k <= geometry.experts or geometry.block_size < 1:
            raise wire.WireError(f"geometry {geometry.shape}, top-{geometry.top_k}, block {geometry.block_size}")
        others = self.geometry
        # A decode server may have another block size: only its layers and experts matter, and those where they are used.
        if hello.phase != "decode" and others is not None and others != geometry:
            self._frames["unlike"].inc()
            log.warning("hook_geometry_differs", worker=hello.worker, shape=geometry.shape, others=others.shape)
        # A hook that reconnects comes under a new identity: its old one is gone.
        peer = _Peer(identity, hello, geometry, monotonic())
        silent = peer.heard - _SILENT_S
        for old in [i for i, p in self._peers.items() if p.hello.worker == hello.worker or p.heard < silent]:
            gone = self._peers.pop(old)
            for pending in self._lacking.values():
                if pending.peer is gone and gone.hello.worker == hello.worker and gone.geometry == geometry:
                    pending.peer = peer
        self._peers[identity] = peer
        log.info(
            "hook_connected",
            worker=hello.worker,
            phase=hello.phase,
            model=hello.model,
            layers=len(hello.layers),
            experts=hello.experts,
            top_k=hello.top_k,
            block_size=hello.block_size,
        )

    def _blocks(self, peer: _Peer, header: wire.Blocks, frames: list[bytes]) -> None:
        self._frames["blocks"].inc()
        hashes = wire.hashes(frames, header.n)
        self._cache.insert(peer.geometry, hashes, wire.counts(frames, header.n, header.dtype, peer.geometry))
        for eldr_id, pending in list(self._lacking.items()):
            if pending.peer is peer and self._sum(pending, peer):
                del self._lacking[eldr_id]
                _wake(pending.waiter)

    def _request(self, peer: _Peer, header: wire.Request, frames: list[bytes]) -> None:
        pending = self._pending.get(header.id)
        if pending is None:
            self._frames["unasked"].inc()
            return
        self._frames["request"].inc()
        pending.hashes = wire.hashes(frames, header.blocks)
        pending.tail = wire.counts(frames, 1, header.dtype, peer.geometry)[0]
        pending.tokens = header.tokens
        if header.partial:
            counts = pending.tail.astype(np.int32)
            self._cache.gather(peer.geometry, pending.hashes, counts)
            pending.signature = Signature("partial", counts, header.tokens, peer.geometry, header.id)
        elif not self._sum(pending, peer):
            pending.peer = peer
            self._lacking[header.id] = pending
            lacking = self._cache.lacking(peer.geometry, pending.hashes)
            self._frames["want"].inc()
            self._send(peer.identity, wire.encode(wire.Want(v=wire.VERSION, n=len(lacking)), lacking))
            return
        _wake(pending.waiter)

    def _take_decoded(self, peer: _Peer, header: wire.Decoded, frames: list[bytes]) -> None:
        self._frames["decoded"].inc()
        geometry = peer.geometry
        counts = wire.counts(frames, 1, header.dtype, geometry, at=1)[0]
        if int(counts.sum()) != header.tokens * len(geometry.layers) * geometry.top_k:
            raise wire.WireError(f"decode counts that are not those of {header.tokens} tokens")
        self._decoded[header.id] = Decoded(counts, header.tokens, geometry)
        if len(self._decoded) > _DECODED:
            self._decoded.popitem(last=False)

    def _sum(self, pending: _Pending, peer: _Peer) -> bool:
        """Add up the request's rows; whether none is lacking."""
        counts = pending.tail.astype(np.int32)
        missing = self._cache.gather(peer.geometry, pending.hashes, counts)
        geometry = peer.geometry
        # Every prompt token chose top_k experts in every layer: anything else is not a whole signature.
        whole = int(counts.sum()) == pending.tokens * len(geometry.layers) * geometry.top_k
        state = "exact" if whole and not missing else "partial"
        pending.signature = Signature(state, counts, pending.tokens, geometry, pending.eldr_id)
        if missing:
            return False
        pending.peer = None
        return True

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            # The peer is gone or does not read: it will say hello again.
            log.debug("signature_send_failed", errno=e.errno)
        if self._again is None:
            # A send can consume the descriptor's edge (zmq_getsockopt(3), ZMQ_FD): look again.
            self._again = asyncio.get_running_loop().call_soon(self._readable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
