"""The connections to one worker, and the watch over relays that make no progress. Reads and writes no bytes itself."""

from __future__ import annotations

import asyncio
import ssl as tls
from urllib.parse import urlsplit

from eldrd.fleet.connection import Connection, UpstreamError

# uvicorn, which serves vLLM, closes idle connections after 5 s; ours must be gone before.
MAX_IDLE_S = 4.0
# How late a timeout may be noticed.
_LOOK_S = 0.05


class ConnectionPool:
    """The connections to one worker. Idle ones are used newest first and closed after MAX_IDLE_S."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.netloc = parts.netloc.encode()
        self.connect_timeout_s = connect_timeout_s
        self._tls = tls.create_default_context() if parts.scheme == "https" else None
        # A dict for its order, oldest first, and because any of them may have to be taken out.
        self._idle: dict[Connection, None] = {}
        self._closed = False
        self._look_at = 0.0
        # Those with an exchange that has to make progress by a certain time.
        self.waits: dict[Connection, None] = {}
        self._watching = False

    def pop(self) -> Connection | None:
        """An idle connection, None if there is none that can be used."""
        while self._idle:
            c, _ = self._idle.popitem()
            if c.transport is None or c.transport.is_closing():
                continue
            if c.idle_for(c.loop.time()) < MAX_IDLE_S:
                return c
            c.abort()
        return None

    async def get(self) -> Connection:
        """An idle connection, or a new one. Raises UpstreamError(connect)."""
        return self.pop() or await self.connect()

    async def connect(self) -> Connection:
        """A new connection. Raises UpstreamError(connect)."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, loop), self.host, self.port, ssl=self._tls
                )
        except TimeoutError:
            raise UpstreamError("connect", "timeout", answered=False) from None
        except OSError:
            raise UpstreamError("connect", "refused", answered=False) from None
        return connection

    def __contains__(self, connection: object) -> bool:
        return connection in self._idle

    def put(self, connection: Connection, now: float) -> None:
        """Keep an idle connection; ``now``: its loop's time."""
        if self._closed:
            connection.abort()
            return
        self._idle[connection] = None
        if now >= self._look_at:
            self._look_at = now + MAX_IDLE_S / 4
            for oldest in list(self._idle):
                if oldest.idle_for(now) <= MAX_IDLE_S:
                    break
                del self._idle[oldest]
                oldest.abort()

    def waiting(self, connection: Connection) -> None:
        """Fail the connection's exchange once it is overdue, unless it leaves ``waits`` before. One timer for all of a
        worker's connections: a timer each would cost every request twice."""
        self.waits[connection] = None
        if not self._watching:
            self._watching = True
            connection.loop.call_later(_LOOK_S, self._look, connection.loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in [c for c in self.waits if c.overdue(now)]:
            self.waits.pop(connection, None)
            connection.stall("timeout")
        self._watching = bool(self.waits)
        if self.waits:
            loop.call_later(_LOOK_S, self._look, loop)

    def drop(self, connection: Connection) -> None:
        # One in use is not in there; an idle one that the worker closed is.
        self._idle.pop(connection, None)

    def close_idle(self) -> None:
        while self._idle:
            self._idle.popitem()[0].abort()

    def close(self) -> None:
        """Close the idle connections; those in use close when released."""
        self._closed = True
        self.close_idle()


class IdleWatch:
    """Ends relays that make no progress, without a timer per piece: a scan every second over the relays under way."""

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self._active: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._active)

    def add(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.seen = connection.progress
        connection.seen_at = loop.time()
        self._active.add(connection)
        if self._timer is None:
            self._timer = loop.call_later(min(1.0, self.idle_s / 2), self._scan)

    def remove(self, connection: Connection) -> None:
        self._active.discard(connection)

    def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for c in list(self._active):
            if c.progress != c.seen:
                c.seen = c.progress
                c.seen_at = now
            elif now - c.seen_at > self.idle_s:
                c.stall("stalled" if c.paused else "timeout")
        self._timer = loop.call_later(min(1.0, self.idle_s / 2), self._scan) if self._active else None
