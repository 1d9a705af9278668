"""Sends counts to one or more daemons from a thread of its own. Sockets only: nothing of vLLM, no counting.

Nothing here may slow or stop the engine: the queue is bounded, a full queue drops and counts, and no exception leaves
the thread. Rows are kept in a bounded LRU, so a daemon that lacks some (it restarted, frames were lost) gets them with
``want``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from eldrd_hook import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd_hook.attribution import Counted, Record

log = logging.getLogger("vllm.eldrd_hook")

HELLO_SECONDS = 5.0
# Few enough that eldrd takes a message in a millisecond.
_ROWS_A_MESSAGE = 32
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Rows:
    """Counts of the latest blocks by 64-bit hash, least recently used out first. Not thread-safe by itself."""

    def __init__(self, budget: int) -> None:
        """budget: bytes of counts to keep."""
        self._budget, self._bytes = budget, 0
        self._rows: OrderedDict[int, NDArray[np.generic]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, hashes: NDArray[np.uint64], counts: NDArray[np.generic]) -> NDArray[np.generic]:
        """Keeps the rows; the first write of a hash wins. Gives back the rows as kept, [n, L * E]."""
        kept = []
        for h, row in zip(hashes.tolist(), counts, strict=True):
            known = self._rows.get(h)
            if known is None:
                known = self._rows[h] = row.copy()
                self._bytes += known.nbytes
            else:
                self._rows.move_to_end(h)
            kept.append(known)
        while self._bytes > self._budget:
            self._bytes -= self._rows.popitem(last=False)[1].nbytes
        return np.stack(kept) if kept else counts

    def find(self, hashes: NDArray[np.uint64]) -> list[tuple[int, NDArray[np.generic]]]:
        """Those of the hashes that are still here, with their counts."""
        return [(h, self._rows[h]) for h in hashes.tolist() if h in self._rows]


@dataclass(frozen=True, slots=True)
class _Message:
    header: wire.Blocks | wire.Request | wire.Decoded | wire.Steps
    arrays: tuple[NDArray[np.generic], ...]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays) + 64


class _Link:
    """The connection to one daemon."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, hello: wire.Hello) -> None:
        self.endpoint = endpoint
        self.connected = False
        self.lost = 0
        self._hello = hello
        self._seq = 0
        self.socket = context.socket(zmq.DEALER)
        # Nothing is kept for a daemon that is away: it asks for what it lacks once it is back.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.SNDHWM, 1024)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(endpoint)

    def events(self) -> None:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self._seq = 0
                self.hello()

    def receive(self) -> list[wire.Who | NDArray[np.uint64]]:
        heard = []
        while self.socket.poll(0, zmq.POLLIN):
            try:
                heard.append(wire.decode(self.socket.recv_multipart(zmq.NOBLOCK)))
            except wire.WireError as e:
                log.warning("eldrd hook: %s sent a message this hook cannot read: %s", self.endpoint, e)
        return heard

    def hello(self) -> None:
        if self.connected:
            self._send(wire.encode(self._hello))

    def send(self, message: _Message) -> None:
        if not self.connected:
            return
        # The number is the connection's own: a gap tells the daemon that a message was lost on its way.
        frames = wire.encode(msgspec.structs.replace(message.header, seq=self._seq), *message.arrays)
        self._seq += 1
        if not self._send(frames):
            self.lost += 1

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


class Pusher:
    """Queue, row store and thread. ``push`` may be called from one thread at a time and never blocks."""

    def __init__(
        self,
        endpoints: Sequence[str],
        hello: wire.Hello,
        *,
        queue_bytes: int = 64 << 20,
        row_bytes: int = 256 << 20,
        hello_seconds: float = HELLO_SECONDS,
    ) -> None:
        """endpoints: ZMQ addresses of the daemons; queue_bytes, row_bytes: bounds of the queue and of the row store."""
        self._endpoints, self._hello, self._hello_seconds = list(endpoints), hello, hello_seconds
        self._dtype = wire.dtype_for(hello.block_size)
        self._queue: deque[_Message] = deque()
        self._queued, self._queue_bytes = 0, queue_bytes
        self._rows = Rows(row_bytes)
        self._lock = threading.Lock()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stop = False
        self.dropped = 0
        """Messages that the full queue refused or a connection could not take."""
        self._thread = threading.Thread(target=self._run, name="eldrd-push", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def push(self, counted: Counted) -> None:
        """Queues the rows, then the records: a record never overtakes the blocks it names."""
        messages = []
        with self._lock:
            rows = self._rows.add(counted.hashes, counted.counts)
        for at in range(0, len(counted.hashes), _ROWS_A_MESSAGE):
            hashes = counted.hashes[at : at + _ROWS_A_MESSAGE]
            header = wire.Blocks(wire.VERSION, 0, len(hashes), self._dtype)
            messages.append(_Message(header, (hashes, rows[at : at + _ROWS_A_MESSAGE])))
        messages.extend(self._record(r) for r in counted.records)
        for d in counted.decoded:
            dtype = wire.dtype_of_decoded(d.tokens)
            messages.append(_Message(wire.Decoded(wire.VERSION, 0, d.key, d.tokens, dtype), (d.counts,)))
        self._put(messages)

    def push_steps(self, totals: wire.Steps) -> None:
        """Queues the totals of decode steps."""
        self._put([_Message(totals, ())])

    def _put(self, messages: list[_Message]) -> None:
        if not messages:
            return
        with self._lock:
            for m in messages:
                if self._queued + m.nbytes > self._queue_bytes:
                    self._drop()
                    continue
                self._queue.append(m)
                self._queued += m.nbytes
        self._wake()

    def close(self, timeout: float = 2.0) -> None:
        """Sends what is queued and ends the thread, waiting at most ``timeout`` seconds."""
        self._stop = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _record(self, r: Record) -> _Message:
        header = wire.Request(wire.VERSION, 0, r.key, r.tokens, len(r.hashes), r.tail, r.partial, self._dtype)
        return _Message(header, (r.hashes, r.counts))

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning("eldrd hook: cannot send as fast as the engine computes; dropping messages from here on")

    def _wake(self) -> None:
        # A full pipe means that the thread has a wake-up waiting already.
        with contextlib.suppress(BlockingIOError):
            self._wake_out.send(b"\0")

    def _take(self) -> list[_Message]:
        with self._lock:
            messages = list(self._queue)
            self._queue.clear()
            self._queued = 0
        return messages

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        links = [_Link(context, e, self._hello) for e in self._endpoints]
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        for link in links:
            poller.register(link.monitor, zmq.POLLIN)
            poller.register(link.socket, zmq.POLLIN)
        next_hello = time.monotonic() + self._hello_seconds
        complained = False
        while not self._stop:
            try:
                poller.poll(int(max(0.0, next_hello - time.monotonic()) * 1000) + 1)
                self._turn(links)
                if time.monotonic() >= next_hello:
                    next_hello = time.monotonic() + self._hello_seconds
                    for link in links:
                        link.hello()
            except Exception:
                if not complained:
                    complained = True
                    log.exception("eldrd hook: sending failed; this is said once")
                time.sleep(0.1)
        for message in self._take():
            for link in links:
                link.send(message)
        for link in links:
            link.close()
        context.term()

    def _turn(self, links: list[_Link]) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                continue
        for link in links:
            link.events()
            for heard in link.receive():
                self._answer(link, heard)
        lost = sum(link.lost for link in links)
        for message in self._take():
            for link in links:
                link.send(message)
        for _ in range(sum(link.lost for link in links) - lost):
            self._drop()

    def _answer(self, link: _Link, heard: wire.Who | NDArray[np.uint64]) -> None:
        if isinstance(heard, wire.Who):
            link.hello()
            return
        with self._lock:
            found = self._rows.find(heard)
        for at in range(0, len(found), _ROWS_A_MESSAGE):
            part = found[at : at + _ROWS_A_MESSAGE]
            header = wire.Blocks(wire.VERSION, 0, len(part), self._dtype)
            link.send(_Message(header, (np.array([h for h, _ in part], wire.HASH), np.stack([c for _, c in part]))))
