"""The listener's HTTP server: all its connections, their idle limits and their end. Parses nothing, knows no path."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from eldrd.api.http import HttpConnection

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from eldrd.api.exchange import Exchange


class Handler(Protocol):
    """What the server asks of the application."""

    def limit(self) -> int:
        """The largest body in bytes."""

    def begin(self, exchange: Exchange) -> None:
        """The head is here; setting ``exchange.failure`` keeps the body from being stored."""

    def handle(self, exchange: Exchange) -> Coroutine[Any, Any, bool] | None:
        """The request is here: answer it at once, or return what will, and says whether the connection can be kept."""

    def malformed(self) -> None:
        """Something came that is no HTTP."""

    def abandoned(self, exchange: Exchange) -> None:
        """The client went away before all of its request had come."""


class HttpServer:
    """The listener's connections, for ``loop.create_server``. keepalive_s: how long an idle one is kept."""

    def __init__(self, handler: Handler, keepalive_s: float) -> None:
        self.handler = handler
        self.loop = asyncio.get_running_loop()
        self.connections: set[HttpConnection] = set()
        # Answers end their connections from now on.
        self.closing = False
        self._keepalive_s = keepalive_s
        self._interval_s = max(0.01, min(1.0, keepalive_s / 4))
        self._timer = self.loop.call_later(self._interval_s, self._sweep)

    def __call__(self) -> HttpConnection:
        return HttpConnection(self)

    def pre_shutdown(self) -> None:
        """Close idle connections; the others close with their answer."""
        self.closing = True
        for connection in list(self.connections):
            if connection.idle:
                connection.close()

    async def shutdown(self, timeout_s: float) -> None:
        """End what is still served, let written answers leave for up to ``timeout_s``, then close everything."""
        self.pre_shutdown()
        for connection in list(self.connections):
            connection.end()
        deadline = self.loop.time() + timeout_s
        while self.connections and self.loop.time() < deadline:  # noqa: ASYNC110, the end is no hot path
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        self._timer.cancel()

    def _sweep(self) -> None:
        """One timer for all connections: a timer each would cost every request."""
        now = self.loop.time()
        for connection in list(self.connections):
            connection.check(now, self._keepalive_s)
        self._timer = self.loop.call_later(self._interval_s, self._sweep)
