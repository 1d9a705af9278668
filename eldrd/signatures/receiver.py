"""Where the hooks' frames arrive: a ZMTP listener on the loop, the block cache behind it, and the requests that wait.

Chooses no worker and knows no HTTP. A signature leaves here exact, or as partial or missing with the reason.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import structlog

from eldrd.signatures import wire
from eldrd.signatures.events import CacheEvents
from eldrd.signatures.steps import StepFigures
from eldrd.signatures.zmtp import Listener

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eldrd.signatures.cache import SignatureCache
    from eldrd.signatures.geometry import Geometry
    from eldrd.signatures.zmtp import Connection, Frame
    from eldrd.telemetry.metrics import Metrics

log = structlog.get_logger()

_HEARD: Final = ("hello", "blocks", "request", "decoded", "steps")
# Ended requests whose decode counts wait to be taken; the oldest goes.
_DECODED: Final = 1024
# Three times as long as hooks take to say hello again.
_SILENT_S: Final = 15.0
# Far above any hello's; and cells of a row, a hundred times those of the largest models.
_HEADER_BYTES: Final = 64 << 10
_MOST_CELLS: Final = 4 << 20
_NO_HASHES: Final = np.empty(0, np.uint64)
_NO_TAIL: Final = np.empty(0, np.uint8)


class Signature(msgspec.Struct, frozen=True, eq=False):
    """A request's expert counts: int32 [L * E], over all its prompt tokens when ``state`` is exact."""

    state: str
    counts: NDArray[np.int32]
    tokens: int
    geometry: Geometry
    eldr_id: str = ""


class Decoded(msgspec.Struct, frozen=True, eq=False):
    """What a request generated: counts uint16 or uint32 [L * E] of ``tokens`` tokens, all but the last one."""

    counts: NDArray[np.unsignedinteger[Any]]
    tokens: int
    geometry: Geometry


class _Peer(msgspec.Struct, eq=False):
    """One hook's connection. seq: its last message number; heard: monotonic time of its last hello."""

    connection: Connection
    hello: wire.Hello
    geometry: Geometry
    heard: float
    seq: int = 0


class _Pending(msgspec.Struct, eq=False):
    """A request whose signature somebody will ask for."""

    eldr_id: str
    waiter: asyncio.Future[None] | None = None
    signature: Signature | None = None
    # While rows are lacking: what is needed to try again.
    peer: _Peer | None = None
    hashes: NDArray[np.uint64] = _NO_HASHES
    tail: NDArray[np.unsignedinteger[Any]] = _NO_TAIL
    tokens: int = 0


class SignatureReceiver:
    """Takes frames, fills the cache, and answers ``wait`` with the signature of an expected request."""

    def __init__(self, cache: SignatureCache, metrics: Metrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._frames = {
            k: metrics.frames.labels(k)
            for k in (*_HEARD, "unasked", "unsent", "want", "who", "invalid", "lost", "unlike")
        }
        self.steps = StepFigures(metrics)
        self.events = CacheEvents(cache, metrics, lambda: self.geometry)
        self._peers: dict[Connection, _Peer] = {}
        self._pending: dict[str, _Pending] = {}
        self._lacking: dict[str, _Pending] = {}
        self._decoded: OrderedDict[str, Decoded] = OrderedDict()
        self._listener = Listener(self._message, self._complain)

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
        return self._listener.start(endpoint)

    def close(self) -> None:
        self.events.close()
        self._listener.close()

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

    def ready(self, eldr_id: str) -> Signature | None:
        """The signature of an expected request if it is here and no row of it is lacking."""
        pending = self._pending[eldr_id]
        return pending.signature if pending.peer is None else None

    async def wait(self, eldr_id: str, timeout_s: float) -> Signature | None:
        """The signature of an expected request, waiting up to ``timeout_s``; None if the hook's record has not come."""
        pending = self._pending[eldr_id]
        if pending.signature is None or pending.peer is not None:
            loop = asyncio.get_running_loop()
            pending.waiter = loop.create_future()
            timer = loop.call_later(timeout_s, _wake, pending.waiter)
            try:
                await pending.waiter
                if pending.signature is None or pending.peer is not None:
                    # A busy loop runs its timers before it reads: what came in time shall count.
                    await asyncio.sleep(0)
            finally:
                timer.cancel()
                pending.waiter = None
        return pending.signature

    # -- frames ---------------------------------------------------------------------------------------------------------

    def _message(self, connection: Connection, frames: list[Frame]) -> None:
        try:
            if len(frames[0]) > _HEADER_BYTES:
                raise wire.WireError(f"a header of {len(frames[0])} bytes")
            header = wire.decode_header(frames[0])
            if isinstance(header, wire.Hello):
                self._hello(connection, header)
                return
            peer = self._peers.get(connection)
            if peer is None:
                self._frames["who"].inc()
                self._send(connection, wire.encode(wire.Who(v=wire.VERSION)))
            elif isinstance(header, wire.Request):
                self._sequence(peer, header.seq)
                self._request(peer, header, frames)
            elif isinstance(header, wire.Blocks):
                self._sequence(peer, header.seq)
                self._blocks(peer, header, frames)
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
            self._complain(connection, str(e))

    def _complain(self, connection: Connection, problem: str) -> None:
        """Count what keeps to no format or protocol; a peer that goes on with it is named once."""
        self._frames["invalid"].inc()
        if not connection.told:
            connection.told = True
            log.warning("signature_frame_invalid", peer=connection.address, problem=problem[:200])

    def _sequence(self, peer: _Peer, seq: int) -> None:
        if peer.seq and seq > peer.seq + 1:
            self._frames["lost"].inc(seq - peer.seq - 1)
        peer.seq = seq

    def _hello(self, connection: Connection, hello: wire.Hello) -> None:
        self._frames["hello"].inc()
        known = self._peers.get(connection)
        if known is not None and known.hello == hello:
            known.heard = monotonic()
            return
        geometry = hello.geometry()
        if min(geometry.shape) < 1 or not 1 <= geometry.top_k <= geometry.experts or geometry.block_size < 1:
            raise wire.WireError(f"geometry {geometry.shape}, top-{geometry.top_k}, block {geometry.block_size}")
        if geometry.width > _MOST_CELLS:
            raise wire.WireError(f"geometry {geometry.shape}")
        others = self.geometry
        # A decode server may have another block size: only its layers and experts matter, and those where they are used.
        if hello.phase != "decode" and others is not None and others != geometry:
            self._frames["unlike"].inc()
            log.warning("hook_geometry_differs", worker=hello.worker, shape=geometry.shape, others=others.shape)
        # One object for all that count alike: what is known of it is then found by identity.
        geometry = next((p.geometry for p in self._peers.values() if p.geometry == geometry), geometry)
        # A hook that reconnects comes over a new connection: its old one is gone.
        peer = _Peer(connection, hello, geometry, monotonic())
        silent = peer.heard - _SILENT_S
        for old in [c for c, p in self._peers.items() if p.hello.worker == hello.worker or p.heard < silent]:
            gone = self._peers.pop(old)
            for pending in self._lacking.values():
                if pending.peer is gone and gone.hello.worker == hello.worker and gone.geometry == geometry:
                    pending.peer = peer
        self._peers[connection] = peer
        if hello.phase != "decode":
            self._cache.reserve(geometry)
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

    def _blocks(self, peer: _Peer, header: wire.Blocks, frames: list[Frame]) -> None:
        self._frames["blocks"].inc()
        hashes = wire.hashes(frames, header.n)
        self._cache.insert(peer.geometry, hashes, wire.counts(frames, header.n, header.dtype, peer.geometry))
        for eldr_id, pending in list(self._lacking.items()):
            if pending.peer is peer and self._sum(pending, peer):
                del self._lacking[eldr_id]
                _wake(pending.waiter)

    def _request(self, peer: _Peer, header: wire.Request, frames: list[Frame]) -> None:
        pending = self._pending.get(header.id)
        if pending is None:
            self._frames["unasked"].inc()
            return
        self._frames["request"].inc()
        pending.hashes = wire.hashes(frames, header.blocks)
        pending.tail = wire.counts(frames, 1, header.dtype, peer.geometry)[0]
        pending.tokens = header.tokens
        if header.partial:
            counts, _, _ = self._cache.add_up(peer.geometry, pending.hashes, pending.tail)
            pending.signature = Signature("partial", counts, header.tokens, peer.geometry, header.id)
        elif not self._sum(pending, peer):
            pending.peer = peer
            self._lacking[header.id] = pending
            lacking = self._cache.lacking(peer.geometry, pending.hashes)
            self._frames["want"].inc()
            self._send(peer.connection, wire.encode(wire.Want(v=wire.VERSION, n=len(lacking)), lacking))
            return
        if pending.waiter is not None:
            _wake(pending.waiter)

    def _take_decoded(self, peer: _Peer, header: wire.Decoded, frames: list[Frame]) -> None:
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
        geometry = peer.geometry
        counts, missing, total = self._cache.add_up(geometry, pending.hashes, pending.tail)
        # Every prompt token chose top_k experts in every layer: anything else is not a whole signature.
        whole = total == pending.tokens * len(geometry.layers) * geometry.top_k
        state = "exact" if whole and not missing else "partial"
        pending.signature = Signature(state, counts, pending.tokens, geometry, pending.eldr_id)
        if missing:
            return False
        pending.peer = None
        return True

    def _send(self, connection: Connection, frames: list[bytes]) -> None:
        if not connection.send(frames):
            # The peer is gone or does not read: it will say hello again.
            self._frames["unsent"].inc()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
