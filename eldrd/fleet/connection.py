"""HTTP/1.1 to a worker at transport level: one connection and its exchanges. Carries bytes; does not know what they mean."""

from __future__ import annotations

import asyncio
import collections
import socket
from typing import TYPE_CHECKING, Final, cast

from eldrd.fleet.framing import MAX_HEAD, SIZES, BodyTracker, FramingError, Head, dechunk, parse_head

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eldrd.fleet.pool import ConnectionPool


# Requests up to this size leave in one piece.
_JOINED: Final = 65_536


class UpstreamError(ConnectionError):
    """An exchange failed. phase: connect, first_byte, body; cause: refused, timeout, reset, framing, stalled (the client
    did not read), too_large; answered: whether any byte of an answer had arrived; stale: a kept connection turned out to
    be closed, as happens when the worker's idle limit ends it just when it is used again."""

    def __init__(self, phase: str, cause: str, *, answered: bool, stale: bool = False) -> None:
        super().__init__(f"{phase}: {cause}")
        self.phase = phase
        self.cause = cause
        self.answered = answered
        self.stale = stale


class Connection(asyncio.Protocol):
    """One connection to a worker, one exchange at a time: ``send``, then ``collect`` or ``relay``, then ``release``.

    complete: the message has been received to its end. reused: whether an earlier
    exchange ran on this connection. tail: the last pieces of the body, by reference, for whoever wants the usage at its end.
    """

    __slots__ = (
        "_deadline",
        "_done",
        "_early",
        "_enough",
        "_head",
        "_held",
        "_idle_since",
        "_limit",
        "_pieces",
        "_pool",
        "_reusable",
        "_sink",
        "_size",
        "complete",
        "loop",
        "paused",
        "reused",
        "seen",
        "seen_at",
        "tail",
        "tracker",
        "transport",
    )

    def __init__(self, pool: ConnectionPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.tracker: BodyTracker | None = None
        self.paused = False
        self.reused = False
        self._pieces = 0
        self.seen = -1
        self.seen_at = 0.0
        self.tail: collections.deque[bytes] = collections.deque(maxlen=4)
        self._idle_since = 0.0
        self._reusable = False
        self.complete = False
        # What nobody has taken yet; its size and how large it may become count once it is collected.
        self._held: list[bytes] = []
        self._size = 0
        self._limit = 0
        self._sink: Callable[[bytes], object] | None = None
        self._head: asyncio.Future[Head] | None = None
        # A head that waits for the first bytes of its body, and how many it has to.
        self._early: Head | None = None
        self._enough: Callable[[bytes], bool] | None = None
        self._done: asyncio.Future[None] | None = None
        # When the wait for a head or a whole body is over; the pool's watch looks at it.
        self._deadline = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)

    def send(
        self, parts: Sequence[bytes], timeout_s: float, *, enough: Callable[[bytes], bool] | None = None
    ) -> asyncio.Future[Head]:
        """Write a request; the future has the head of its final answer, with ``enough`` only once that says so of the body's
        first bytes, which ``peek`` then shows, or the body is over. Raises UpstreamError(first_byte), at once or by the
        future."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise UpstreamError("first_byte", "reset", answered=False, stale=self.reused)
        self.tracker = None
        self._reusable = False
        self.complete = False
        self._sink = None
        self._limit = 0
        self._held = []
        self._early = None
        self._enough = enough
        loop = self.loop
        head: asyncio.Future[Head] = loop.create_future()
        self._head = head
        self._done = loop.create_future()
        # One piece takes one system call; a large body is not copied for that.
        if len(parts) > 1 and sum(map(len, parts)) > _JOINED:
            transport.writelines(parts)
        else:
            transport.write(b"".join(parts))
        self._deadline = loop.time() + timeout_s
        self._pool.waiting(self)
        return head

    def head(self, timeout_s: float) -> asyncio.Future[Head]:
        """The head of the answer once more, after a wait for it was cancelled. Raises as ``send``."""
        head = self._head
        assert head is not None
        if head.cancelled():
            if self.transport is None or self.transport.is_closing():
                raise UpstreamError("first_byte", "reset", answered=False)
            self._head = head = self.loop.create_future()
        if not head.done():
            self._deadline = self.loop.time() + timeout_s
            self._pool.waiting(self)
        return head

    def overdue(self, now: float) -> bool:
        """Whether what is being waited for should have come by now."""
        return now >= self._deadline

    def peek(self) -> bytes:
        """The body's bytes that have come before ``collect`` or ``relay``, framing included."""
        return b"".join(self._held)

    async def collect(self, timeout_s: float, limit: int) -> bytes:
        """The whole body, transfer coding removed; may be called again after it was cancelled. Raises UpstreamError(body):
        too_large past ``limit`` bytes, timeout after ``timeout_s``."""
        done = self._done
        assert done is not None
        if done.cancelled():
            if self.transport is None or self.transport.is_closing():
                raise UpstreamError("body", "reset", answered=True)
            self._done = done = self.loop.create_future()
        if not self._limit:
            self._limit = limit
            self._size = sum(map(len, self._held))
            if self._size > limit:
                self._fail("too_large")
        if not done.done():
            self._deadline = self.loop.time() + timeout_s
            self._pool.waiting(self)
            await done
        done.result()
        return self.body()

    def body(self) -> bytes:
        """The whole body, transfer coding removed, once it is ``complete`` and if nobody has taken any of it."""
        body = b"".join(self._held)
        return dechunk(body) if self.tracker is not None and self.tracker.chunked else body

    def relay(self, write: Callable[[bytes], object]) -> asyncio.Future[None]:
        """Let every byte of the body, framing included, go to ``write`` as it comes; the future ends with the message or
        fails with UpstreamError(body). A RuntimeError of ``write``, as of uvloop's transport once it is closed, means that
        nobody reads any more: the rest is dropped until the exchange is released."""
        assert self._done is not None
        if self.transport is not None and not self.transport.is_closing():
            # Acknowledge every second piece: one packet for each costs as much as reading it does.
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        self._attach(write)
        return self._done

    def take(self) -> bytes:
        """What has come of the body before anybody took it; nothing, once ``collect`` or ``relay`` has been called."""
        held, self._held = self._held, []
        return b"".join(held)

    def _attach(self, sink: Callable[[bytes], object]) -> None:
        self._sink = sink
        held, self._held = self._held, []
        for data in held:
            self._give(data)

    def _give(self, data: bytes) -> None:
        assert self._sink is not None
        try:
            self._sink(data)
        except RuntimeError:
            self._sink = _nowhere

    def pause(self) -> None:
        """Stop reading: whoever takes the bytes cannot take more."""
        if self.transport is not None and not self.transport.is_closing() and not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def release(self) -> None:
        """The exchange is over: keep the connection for the next one if the message ended as it should, else close it."""
        if self.paused:
            self.resume()
        self._sink = None
        self._held = []
        self.tail.clear()
        if self.complete and self._reusable and self.transport is not None:
            self.reused = True
            self._reusable = False
            self._idle_since = now = self.loop.time()
            self._pool.put(self, now)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once; the worker sees a disconnect and ends the request."""
        self._pool.waits.pop(self, None)
        self._sink = None
        if self.transport is not None:
            self.transport.abort()

    @property
    def progress(self) -> int:
        """Grows with whatever is received."""
        return self._pieces + (self.tracker.chunks if self.tracker is not None else 0)

    @property
    def idle(self) -> bool:
        """Whether it is back in the pool."""
        return self in self._pool

    def idle_for(self, now: float) -> float:
        return now - self._idle_since

    def data_received(self, data: bytes) -> None:
        tracker = self.tracker
        if tracker is None:
            self._head_bytes(data)
            return
        sink = self._sink
        if tracker.between_chunks and sink is not None:
            # A relay, and mostly one whole chunk, as a worker's token comes.
            line = data.find(b"\r\n", 0, 5)
            if line + 4 + SIZES.get(data[:line], -4) == len(data):
                tracker.chunks += 1
                self.tail.append(data)
                try:
                    sink(data)
                except RuntimeError:
                    self._sink = _nowhere
                return
        if self.complete:
            # Bytes after the end answer nothing we asked: the connection is out of step.
            self.abort()
            return
        self._pieces += 1
        try:
            end = tracker.feed(data)
        except FramingError:
            self._fail("framing")
            return
        if end >= 0:
            self._end(data, end)
            return
        self.tail.append(data)
        if sink is not None:
            self._give(data)
        else:
            self._hold(data)
            if self._early is not None and self._enough is not None and self._enough(self.peek()):
                self._answer(self._early)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        if self._limit:
            self._size += len(data)
            if self._size > self._limit:
                self._fail("too_large")

    def _answer(self, head: Head) -> None:
        self._early = None
        if self._head is not None and not self._head.done():
            self._pool.waits.pop(self, None)
            self._head.set_result(head)

    def _end(self, data: bytes, end: int) -> None:
        done = self._done
        if done is None or done.done():
            self.abort()
            return
        extra = end < len(data)
        if extra:
            data = data[:end]
        if data:
            self.tail.append(data)
            if self._sink is not None:
                self._give(data)
            else:
                self._hold(data)
        self._reusable = self._reusable and not extra
        self.complete = True
        if self._early is not None:
            self._answer(self._early)
        # The sink may have ended the exchange: too large.
        if not done.done():
            self._pool.waits.pop(self, None)
            done.set_result(None)

    def _head_bytes(self, data: bytes) -> None:
        head_future = self._head
        if head_future is None or head_future.done():
            self.abort()
            return
        if self._held:
            data = self._held.pop() + data
        start = 0
        try:
            while True:
                end = data.find(b"\r\n\r\n", start)
                if end < 0:
                    if len(data) - start > MAX_HEAD:
                        raise FramingError("head")
                    if start < len(data):
                        self._held.append(data[start:])
                    return
                head = parse_head(data[start:end])
                if not 100 <= head.status < 200 or head.status == 101:
                    break
                start = end + 4
            tracker = BodyTracker(head)
        except FramingError:
            self._fail("framing")
            return
        self.tracker = tracker
        self._reusable = head.keep_alive and not tracker.ends_with_connection
        if self._enough is not None:
            self._early = head
        else:
            self._pool.waits.pop(self, None)
            head_future.set_result(head)
        rest = data[end + 4 :]
        if rest or tracker.length == 0:
            self.data_received(rest)

    def _fail(self, cause: str) -> None:
        self._pool.waits.pop(self, None)
        head, done = self._head, self._done
        if head is not None and not head.done():
            answered = bool(self._held) or self._early is not None
            stale = self.reused and cause == "reset" and not answered
            if stale:
                self._pool.close_idle()
            head.set_exception(UpstreamError("first_byte", cause, answered=answered, stale=stale))
        elif done is not None and not done.done():
            done.set_exception(UpstreamError("body", cause, answered=True))
            # Looked at only by whoever waits for the end; nobody may.
            done.exception()
        self._reusable = False
        self.abort()

    def stall(self, cause: str) -> None:
        """End the exchange for want of progress: ``timeout`` (the worker is silent) or ``stalled`` (the client)."""
        self._fail(cause)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._pool.drop(self)
        done = self._done
        if (
            exc is None
            and done is not None
            and not done.done()
            and self.tracker is not None
            and self.tracker.ends_with_connection
        ):
            if self._early is not None:
                self._answer(self._early)
            done.set_result(None)
            return
        self._fail("reset")


def _nowhere(_: bytes) -> None:
    """The sink of an exchange whose taker is gone."""
