"""One client's HTTP/1.1 connection (RFC 9112): the exchanges that its bytes make. Knows no path, routes nothing.

httptools (llhttp) judges the bytes. What it is too strict or silent about is settled here: an Upgrade that nobody asked
for is ignored (RFC 9110, 7.8), trailers are dropped, heads, bodies and what surrounds these are bounded.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING, Any, Final, cast

import httptools

from eldrd.api.errors import too_large
from eldrd.api.exchange import Exchange, path_of
from eldrd.api.tcp import peer_is_there
from eldrd.handoff.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from eldrd.api.server import HttpServer
    from eldrd.handoff.answer import Flow

MAX_HEAD: Final = 65_536
# Between two reads of one request, and until an answer of eldrd's own has been taken.
STALLED_S: Final = 60.0
# After an answer that came before the end of the request, for the client to read it.
LINGER_S: Final = 5.0
# Bytes of a chunk of one byte that are not its contents, and some for a padded size.
_AROUND: Final = 16
# Answers in one turn of the loop to a client that pipelines: others wait meanwhile.
_AT_ONCE: Final = 8
_VERSIONS: Final = ("1.1", "1.0")
# Those that eldrd or its workers have a use for; the others are not worth their decoding.
_LOOKED_AT: Final = {
    name.encode(): name
    for name in (
        "authorization", "content-length", "expect", "origin", "traceparent", "tracestate", "transfer-encoding",
        "x-eldrd-label", "x-request-id",
    )
}  # fmt: skip


class HttpConnection(asyncio.Protocol):
    """One client. Requests are served one after another; those that come early wait, and reading stops meanwhile, but
    for the sweep's look whether the client is there.

    upstream: whose bytes are being relayed to this client, paused while it does not read.
    """

    __slots__ = (
        "_around",
        "_body",
        "_burst",
        "_deaf",
        "_exchange",
        "_going_on",
        "_head_bytes",
        "_in_head",
        "_limit",
        "_lingering",
        "_parser",
        "_paused_reading",
        "_queue",
        "_server",
        "_since",
        "_size",
        "_task",
        "_transport",
        "upstream",
        "writing_paused",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._queue: collections.deque[Exchange] | None = None
        self._exchange: Exchange | None = None
        self._in_head = False
        # Whether the head began in an earlier read.
        self._going_on = False
        self._head_bytes = 0
        self._body: bytes | bytearray = b""
        self._size = 0
        # Chunk sizes, extensions and trailers of the body.
        self._around = 0
        # Requests served in this read.
        self._burst = 0
        self._limit = 0
        # After a request that cannot be read or is refused early nothing more is read, and its sender gets time to leave.
        self._deaf = False
        self._lingering = False
        self._paused_reading = False
        self._since = server.loop.time()
        self.upstream: Flow | None = None
        self.writing_paused = False

    @property
    def transport(self) -> asyncio.Transport:
        """Raises ConnectionResetError once the client is gone."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError
        return self._transport

    @property
    def closing(self) -> bool:
        """Whether the server is going: no answer may promise to keep the connection."""
        return self._server.closing

    @property
    def idle(self) -> bool:
        return self._task is None and self._exchange is None and not self._lingering

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002, asyncio's signature
        self._transport = None
        self._server.connections.discard(self)
        if self._exchange is not None and not self._in_head:
            self._server.handler.abandoned(self._exchange)
        self._exchange = self._queue = None
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.writing_paused = True
        if self.upstream is not None:
            self.upstream.pause()

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._since = self._server.loop.time()
        if self.upstream is not None:
            self.upstream.resume()
        elif self._task is None:
            self._next()

    def data_received(self, data: bytes) -> None:
        self._burst = 0
        while data and not self._deaf:
            data = self._feed(data)

    def _feed(self, data: bytes) -> bytes:
        """Give the parser what has been read; what it must be given on top of that."""
        self._going_on = self._in_head
        before, size = self._exchange, self._size
        upgrade_at = -1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            upgrade_at = upgrade.args[0]
        except httptools.HttpParserError as e:
            # One that a callback of ours raised is wrapped.
            inner = e.__context__
            if inner is not None and not isinstance(inner, httptools.HttpParserError):
                raise inner from None
            self._malformed()
        if upgrade_at >= 0:
            return self._without_upgrade(data, upgrade_at)
        if self._in_head:
            if self._going_on:
                self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._malformed(431)
        elif before is not None and before is self._exchange and not self._going_on:
            self._around += len(data) - (self._size - size)
            if self._around > MAX_HEAD + _AROUND * self._size:
                self._malformed()
        return b""

    # -- httptools ----------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._deaf:
            # Behind the last request, in the same read.
            return
        self._exchange = Exchange(self)
        self._in_head = True
        self._going_on = False
        self._head_bytes = 0
        self._since = self._server.loop.time()

    def on_url(self, url: bytes) -> None:
        if self._exchange is not None:
            self._exchange.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the body these are trailers.
        if self._in_head and self._exchange is not None:
            if not self._going_on:
                # The read that a head begins in may hold another request's body before it.
                self._head_bytes += len(name) + len(value)
            key = _LOOKED_AT.get(name.lower())
            if key is not None:
                self._exchange.headers.setdefault(key, value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        self._in_head = False
        if exchange is None:
            return
        if self._head_bytes > MAX_HEAD:
            self._malformed(431)
            return
        parser = self._parser
        method = parser.get_method()
        exchange.method = "POST" if method == b"POST" else method.decode("latin-1")
        version = parser.get_http_version()
        exchange.http11 = version == "1.1"
        exchange.keep_alive = parser.should_keep_alive()
        exchange.path = path_of(exchange.url)
        self._body = b""
        self._size = self._around = 0
        headers = exchange.headers
        coding = headers.get("transfer-encoding")
        # Of a coding before the last, or in HTTP/1.0, every server thinks differently (RFC 9112, 6.1).
        if version not in _VERSIONS or (coding is not None and (coding.lower() != "chunked" or version == "1.0")):
            # Answered as whatever cannot be read.
            raise httptools.HttpParserError
        if parser.should_upgrade():
            return
        handler = self._server.handler
        handler.begin(exchange)
        self._limit = limit = handler.limit()
        huge = "content-length" in headers and int(headers["content-length"]) > limit
        if huge and exchange.failure is None:
            exchange.failure = too_large(limit)
        expects = "expect" in headers and headers["expect"].lower() == "100-continue" and exchange.http11
        if exchange.failure is not None:
            if huge or expects:
                self._refuse(exchange)
        elif expects and self._task is None and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._since = self._server.loop.time()
        self._size += len(body)
        if self._size > self._limit:
            exchange.failure = exchange.failure or too_large(self._limit)
            self._body = b""
            self._refuse(exchange)
        elif exchange.failure is None:
            if self._body and type(self._body) is bytes:
                # A list of its pieces would take many times the bytes of those that are tiny.
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or self._parser.should_upgrade():
            return
        self._exchange = None
        exchange.body = bytes(self._body)
        self._body = b""
        self._take(exchange)

    # -- requests -----------------------------------------------------------------------------------------------------------

    def _take(self, exchange: Exchange) -> None:
        """Serve what has come, or let it wait for its turn."""
        if self._task is None and not self.writing_paused and self._queue is None:
            self._burst += 1
            if self._burst <= _AT_ONCE:
                self._serve(exchange)
                return
            self._server.loop.call_soon(self._next)
        if self._queue is None:
            self._queue = collections.deque()
        self._queue.append(exchange)
        if not self._paused_reading and self._transport is not None and not self._transport.is_closing():
            self._paused_reading = True
            self._transport.pause_reading()

    def _serve(self, exchange: Exchange) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        coroutine = self._server.handler.handle(exchange)
        if coroutine is None:
            self._over(keep=exchange.keep_alive)
        else:
            self._task = self._server.loop.create_task(self._run(coroutine))

    async def _run(self, coroutine: Coroutine[Any, Any, bool]) -> None:
        keep = False
        try:
            keep = await coroutine
        except (asyncio.CancelledError, ConnectionError):
            # The client is gone, or the server goes; the application has taken note.
            pass
        finally:
            self._task = None
            self._over(keep=keep)
            self._next()

    def _over(self, *, keep: bool) -> None:
        """An exchange has ended."""
        self._since = self._server.loop.time()
        if self._transport is None or (keep and not self._server.closing):
            return
        others = bool(self._queue)
        self._queue = None
        if self._deaf and not others:
            # The client may still be sending: closing now could take the answer from it.
            self._lingering = True
            if not self._transport.is_closing():
                self._transport.write_eof()
        else:
            self._transport.close()

    def _next(self) -> None:
        served = 0
        while self._queue and self._task is None and not self.writing_paused:
            if served == _AT_ONCE:
                self._server.loop.call_soon(self._next)
                return
            served += 1
            self._serve(self._queue.popleft())
        if self._queue is not None and not self._queue and self._task is None and not self.writing_paused:
            self._queue = None
            if self._paused_reading and self._transport is not None and not self._transport.is_closing():
                self._paused_reading = False
                self._transport.resume_reading()

    def _refuse(self, exchange: Exchange) -> None:
        """Answer before the end of the request, whose rest is not read."""
        exchange.keep_alive = False
        self._exchange = None
        self._deaf = True
        self._take(exchange)

    def _malformed(self, status: int = 400) -> None:
        self._exchange = None
        self._in_head = False
        if not self._deaf:
            self._deaf = True
            self._server.handler.malformed()
            failure = Failure(status, "BadRequestError", "The request is not well-formed HTTP.", outcome="malformed")
            exchange = Exchange(self)
            exchange.keep_alive = False
            exchange.failure = failure
            self._take(exchange)

    def _without_upgrade(self, data: bytes, offset: int) -> bytes:
        """The parser stops at a request to switch protocols: the head again without that, and what follows."""
        exchange = self._exchange
        self._exchange = None
        if exchange is None:
            return b""
        self._parser = httptools.HttpRequestParser(self)
        if exchange.method == "CONNECT":
            self._malformed()
            return b""
        return exchange.head() + data[offset:]

    # -- ends ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close once everything written has left."""
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """Cancel what is served; the connection closes."""
        if self._task is not None:
            self._task.cancel()
        else:
            self.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def check(self, now: float, keepalive_s: float) -> None:
        """Close what has been idle or has stalled for too long. A relay is the IdleWatch's."""
        if self._paused_reading and self._transport is not None and not peer_is_there(self._transport):
            self.abort()
            return
        waited = now - self._since
        if self._task is not None:
            return
        if self._lingering:
            if waited > LINGER_S:
                self.abort()
        elif self.writing_paused or self._exchange is not None:
            if waited > STALLED_S:
                self.abort()
        elif waited > keepalive_s:
            self.close()
