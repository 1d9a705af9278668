"""One request of a client and its answer: whole, or relayed from a worker. Writes HTTP, reads none, decides nothing."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import httptools

from eldrd.api.errors import error_body
from eldrd.api.tcp import reset
from eldrd.fleet.events import ChunkDecoder
from eldrd.handoff.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eldrd.api.http import HttpConnection
    from eldrd.fleet.framing import BodyTracker, Head
    from eldrd.handoff.answer import Answer, Flow

_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
_NO_FIELDS: Final[tuple[tuple[bytes, bytes], ...]] = ()


class Exchange:
    """A request, and the client's side of its answer (handoff.answer.Client).

    path: without the query; headers: lower-case names to first values, of those that anybody looks at; failure: what the
    request is answered with, however it goes on; keep_alive: whether the connection may serve another request after this
    one; extra: further fields of the answer; client_id: the X-Request-Id of the answer; stream: whether the client expects
    events.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_open_ended",
        "body",
        "client_id",
        "extra",
        "failure",
        "headers",
        "http11",
        "keep_alive",
        "method",
        "path",
        "stream",
        "url",
    )

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.method = ""
        self.url = b""
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.http11 = True
        self.keep_alive = True
        self.failure: Failure | None = None
        self.extra: Sequence[tuple[bytes, bytes]] = _NO_FIELDS
        self.client_id: str | None = None
        self.stream = False
        # How a relayed answer says where it ends: by its chunks, or by the end of the connection.
        self._chunked = False
        self._open_ended = False

    def head(self) -> bytes:
        """The request's head with what is known of it: no Upgrade, and no header that nobody looks at."""
        lines = [b"%b %b HTTP/1.%d" % (self.method.encode(), self.url, self.http11)]
        lines += [f"{k}: {v}".encode("utf-8", "surrogateescape") for k, v in self.headers.items()]
        if not self.keep_alive:
            lines.append(b"connection: close")
        elif not self.http11:
            lines.append(b"connection: keep-alive")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # -- a whole answer -----------------------------------------------------------------------------------------------------

    def respond(self, answer: Answer) -> None:
        """Write an answer that is all here. Raises ConnectionResetError if the client is gone."""
        transport = self._connection.transport
        lines = [b"HTTP/1.1 %d %b\r\n" % (answer.status, _REASONS.get(answer.status, b""))]
        known = self.client_id is not None
        lines += [b"%b: %b\r\n" % f for f in answer.headers if not (known and f[0] == b"x-request-id")]
        if not any(name == b"date" for name, _ in answer.headers):
            lines.append(_date())
        if answer.status != 204:
            lines.append(b"content-length: %d\r\n" % len(answer.body))
        transport.write(self._ended(lines, b"" if self.method == "HEAD" else answer.body))

    def _ended(self, parts: list[bytes], body: bytes) -> bytes:
        """The head's last fields, and the body."""
        parts += [b"%b: %b\r\n" % field for field in self.extra]
        if self.client_id is not None:
            parts.append(b"x-request-id: %b\r\n" % self.client_id.encode("latin-1", "replace"))
        if self._connection.closing:
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        elif not self.http11:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        parts.append(body)
        return b"".join(parts)

    # -- a relay (handoff.answer.Client) ------------------------------------------------------------------------------------

    def can_relay(self, tracker: BodyTracker) -> bool:
        # HTTP/1.0 has no chunks. A stream ends with the connection there; a whole answer can have its length told.
        return self.http11 or not tracker.chunked or self.stream

    def start(
        self, head: Head, tracker: BodyTracker, extra: tuple[bytes, bytes] | None, body: bytes = b""
    ) -> Callable[[bytes], object]:
        transport = self._connection.transport
        passed, dated = head.passed
        parts = [b"HTTP/1.1 %d %b\r\n%b" % (head.status, head.reason, passed)]
        if extra is not None:
            parts.append(b"%b: %b\r\n" % extra)
        if not dated:
            parts.append(_date())
        write: Callable[[bytes], object] = transport.write
        if tracker.chunked and not self.http11:
            self._open_ended = True
            # Of nginx, which otherwise waits for 4 KB where there are no chunks, and does not pass this on.
            parts.append(b"x-accel-buffering: no\r\n")
            decoder = ChunkDecoder()
            body = decoder.feed(body)
            write = _decoded(decoder, write)
        elif tracker.chunked:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        elif tracker.length is not None:
            parts.append(b"content-length: %d\r\n" % tracker.length)
        else:
            self._open_ended = True
        if self._open_ended:
            self.keep_alive = False
        transport.write(self._ended(parts, body))
        return write

    def attach(self, flow: Flow) -> None:
        self._connection.upstream = flow
        if self._connection.writing_paused:
            flow.pause()

    def detach(self) -> None:
        self._connection.upstream = None

    def fail(self, message: str, *, whole_events: bool) -> None:
        try:
            transport = self._connection.transport
        except ConnectionResetError:
            return
        self.keep_alive = False
        if (self._chunked or self._open_ended) and self.stream and whole_events:
            event = b"data: %b\n\n" % error_body(Failure(502, "BadGatewayError", message, outcome="decode_lost"))
            transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
            transport.close()
        else:
            # Inside a chunk or a body of declared length an abrupt end says that it is not whole, else only a reset does.
            if self._open_ended:
                reset(transport)
            else:
                transport.abort()


def _decoded(decoder: ChunkDecoder, write: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """``write`` for what is in the chunks."""
    return lambda data: write(decoder.feed(data))


@lru_cache(maxsize=64)
def path_of(url: bytes) -> str:
    """The path as it came, percent-encoding included, without the query; empty if there is none (RFC 9112, 3.2)."""
    if not url.startswith(b"/"):
        try:
            url = httptools.parse_url(url).path or b"/"
        except httptools.HttpParserError:
            return ""
    return url.partition(b"?")[0].decode("latin-1")


_second = 0
_line = b""


def _date() -> bytes:
    """The Date field (RFC 9110, 6.6.1), made once a second."""
    global _second, _line
    now = int(time.time())
    if now != _second:
        _second = now
        _line = b"date: %b\r\n" % formatdate(now, usegmt=True).encode()
    return _line
