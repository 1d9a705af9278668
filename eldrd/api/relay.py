"""The client's side of a relay: a worker's bytes go straight to the client's transport. No JSON, no routing.

aiohttp parses requests; for a relayed answer its connection handler is told only when the message is over. What is used
of aiohttp beyond its documented API is pinned in tests/api/test_relay.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from eldrd.api.errors import error_body
from eldrd.handoff.failure import Failure

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from aiohttp.abc import AbstractStreamWriter

    from eldrd.fleet.framing import BodyTracker, Head
    from eldrd.handoff.answer import Flow


class RelayHandler(web.RequestHandler):
    """aiohttp's connection handler, which also passes the client's flow control on to the relay's upstream."""

    __slots__ = ("upstream",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.upstream: Flow | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.upstream is not None:
            self.upstream.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.upstream is not None:
            self.upstream.resume()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP gets an error object and is counted; a line of log for each would let anyone fill the disk."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if self._manager is not None:
            cast("RelayServer", self._manager).malformed()
        failure = Failure(status, "BadRequestError", "The request is not well-formed HTTP.", outcome="malformed")
        response = web.Response(status=status, body=error_body(failure), content_type="application/json")
        response.force_close()
        return response


class RelayServer(web.Server):
    """aiohttp's low-level server with RelayHandler connections. malformed: called for each request that is no HTTP."""

    def __init__(self, *args: Any, malformed: Callable[[], object], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.malformed = malformed

    def __call__(self) -> RelayHandler:
        return RelayHandler(self, loop=self._loop, **self._kwargs)


class Relayed(web.StreamResponse):
    """Tells aiohttp that the answer has been written; ``keep_alive`` says whether the connection may be kept."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        super().__init__(status=status)
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:  # noqa: ARG002, aiohttp's signature
        self._eof_sent = True
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002, aiohttp's signature
        return None


class ClientPort:
    """One client request's transport as the lifecycle sees it (handoff.answer.Client). keep_alive: whether the connection
    may serve another request after this one; headers: further ones for the answer."""

    __slots__ = (
        "_chunked",
        "_client_id",
        "_handler",
        "_headers",
        "_stream",
        "_transport",
        "_version",
        "keep_alive",
    )

    def __init__(
        self, request: web.BaseRequest, client_id: str, *, stream: bool, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        handler = request.protocol
        assert isinstance(handler, RelayHandler)
        assert handler.transport is not None
        self._handler = handler
        self._transport: asyncio.Transport = handler.transport
        self._version = request.version
        self.keep_alive = request.keep_alive
        self._client_id = client_id
        self._headers = headers
        self._stream = stream
        self._chunked = False

    def can_relay(self, tracker: BodyTracker) -> bool:
        return self._version >= (1, 1) or not tracker.chunked

    def start(
        self, head: Head, tracker: BodyTracker, headers: list[tuple[bytes, bytes]], body: bytes = b""
    ) -> Callable[[bytes], object]:
        if self._transport.is_closing():
            raise ConnectionResetError
        lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason)]
        lines += [b"%b: %b" % field for field in (*headers, *self._headers) if field[0] != b"x-request-id"]
        lines.append(b"x-request-id: " + self._client_id.encode("latin-1", "replace"))
        length = tracker.length
        if tracker.chunked:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked")
        elif length is not None:
            lines.append(b"content-length: %d" % length)
        self.keep_alive = self.keep_alive and not tracker.ends_with_connection
        if not self.keep_alive:
            lines.append(b"connection: close")
        elif self._version < (1, 1):
            lines.append(b"connection: keep-alive")
        lines.append(b"\r\n" + body)
        self._transport.write(b"\r\n".join(lines))
        return self._transport.write

    def attach(self, flow: Flow) -> None:
        self._handler.upstream = flow
        if self._handler.writing_paused:
            flow.pause()

    def detach(self) -> None:
        self._handler.upstream = None

    def fail(self, message: str, *, whole_events: bool) -> None:
        if self._transport.is_closing():
            return
        if self._chunked and self._stream and whole_events:
            event = b"data: %b\n\n" % error_body(Failure(502, "BadGatewayError", message, outcome="decode_lost"))
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            self._transport.close()
        else:
            # Inside a chunk or a body of declared length only an abrupt end says that it is not whole.
            self._transport.abort()
