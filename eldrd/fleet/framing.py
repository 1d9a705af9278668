"""HTTP/1.1 message framing of answers (RFC 9112): the head, and where the body ends. Pure: no sockets, no copies of bodies."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

MAX_HEAD: Final = 65_536
_MAX_LINE: Final = 4_096
_REMEMBERED: Final = 1_024
_FIELD_LINE: Final = rb"\r\n([!#$%&'*+\-.^_`|~0-9a-zA-Z]++):[ \t]*+([^\r\n\0]*+)"
_FIELD = re.compile(_FIELD_LINE)
_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\r\n\0]*+))?((?:" + _FIELD_LINE + rb")*+)")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
# What a chunk's size line says, for chunks as small as tokens are: looking it up is a third of what parsing it costs.
SIZES: Final = {line: n for n in range(1, 4_096) for line in (b"%x" % n, b"%X" % n)}
# Hop-by-hop, and the length, which the next hop's framing decides.
_NOT_PASSED_ON = frozenset(
    (
        b"content-length",
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)


class FramingError(ValueError):
    """The peer's bytes are not a well-formed HTTP/1.1 answer."""


class Head:
    """Status line and header fields of one answer. Field names are lower case. framing: BodyTracker's, once it is known."""

    __slots__ = ("_first", "_passed", "fields", "framing", "keep_alive", "minor", "reason", "status")

    def __init__(self, minor: int, status: int, reason: bytes, fields: list[tuple[bytes, bytes]]) -> None:
        self.minor = minor
        self.status = status
        self.reason = reason
        self.fields = fields
        # dict() keeps the last of equal names, and the first is wanted.
        self._first = first = dict(reversed(fields))
        self._passed: tuple[bytes, bool] | None = None
        self.framing: tuple[int, int | None] | None = None
        options = first.get(b"connection")
        # Whether the peer lets the connection be used again after this message (RFC 9112, 9.3).
        self.keep_alive = minor == 1 if options is None else _kept(options.lower(), minor)

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field, None if absent."""
        return self._first.get(name)

    @property
    def end_to_end(self) -> list[tuple[bytes, bytes]]:
        """The fields that a proxy passes on (RFC 9110, 7.6.1), less content-length."""
        dropped = _NOT_PASSED_ON
        if connection := self._first.get(b"connection"):
            dropped = dropped.union(option.strip().lower() for option in connection.split(b","))
        return [f for f in self.fields if f[0] not in dropped]

    @property
    def passed(self) -> tuple[bytes, bool]:
        """``end_to_end`` as lines, less x-request-id, each with its CRLF; and whether a date is among them."""
        if self._passed is None:
            lines = b"".join([b"%b: %b\r\n" % f for f in self.end_to_end if f[0] != b"x-request-id"])
            self._passed = lines, b"date" in self._first
        return self._passed


def _kept(options: bytes, minor: int) -> bool:
    return b"close" not in options and (minor == 1 or b"keep-alive" in options)


def parse_head(data: bytes) -> Head:
    """The head in ``data``, which ends before the blank line's CRLF CRLF; not to be changed. Raises FramingError."""
    return _remembered(data) if len(data) <= _REMEMBERED else parse_new_head(data)


def parse_new_head(data: bytes) -> Head:
    """``parse_head`` without its memory."""
    m = _HEAD.fullmatch(data)
    if m is None:
        raise FramingError("head")
    fields = [(name.lower(), value.rstrip(b" \t")) for name, value in _FIELD.findall(data, m.start(4))]
    return Head(int(m[1]), int(m[2]), m[3] or b"", fields)


# Workers send the same few heads over and over within a second: the date alone changes.
_remembered = lru_cache(maxsize=128)(parse_new_head)


class BodyTracker:
    """Follows the bytes of one body to its end without looking into them.

    ``feed`` gets every piece in order and answers the index in that piece where the message ends, -1 while it goes on.
    chunks: chunks of the body begun so far (chunked framing only), the last, empty one not counted. length: the declared
    length, None where there is none. between_chunks: whether the bytes so far end with a whole chunk; where they do, and
    the next piece is one whole chunk (SIZES), a caller in a hurry may count it in ``chunks`` and not feed it.
    """

    __slots__ = ("_left", "_mode", "_part", "between_chunks", "chunks", "length")
    _LENGTH: Final = 0
    _CHUNKED: Final = 1
    _TRAILER: Final = 2
    _CLOSE: Final = 3

    def __init__(self, head: Head) -> None:
        self._part = b""
        self.chunks = 0
        framing = head.framing
        if framing is None:
            framing = head.framing = _framing(head)
        self._mode, self.length = framing
        self._left = self.length or 0
        self.between_chunks = self._mode == self._CHUNKED

    @property
    def chunked(self) -> bool:
        return self._mode in (self._CHUNKED, self._TRAILER)

    @property
    def ends_with_connection(self) -> bool:
        return self._mode == self._CLOSE

    def feed(self, data: bytes) -> int:
        """Take the next piece; the index where the message ends in it, else -1. Raises FramingError."""
        n = len(data)
        left = self._left
        mode = self._mode
        if mode == 1:
            if n < left:
                self._left = left - n
                return -1
            end = self._chunks(data, left)
            self.between_chunks = self._left == 0 and not self._part and self._mode == 1
            return end
        if mode == 0:
            if n < left:
                self._left = left - n
                return -1
            self._left = 0
            return left
        if mode == 2:
            return self._trailer(data, 0)
        return -1

    def _chunks(self, data: bytes, pos: int) -> int:
        held = len(self._part)
        if held:
            data = self._part + data
            pos = 0
            self._part = b""
        n = len(data)
        while pos < n:
            m = _SIZE.match(data, pos)
            if m is None:
                rest = data[pos:]
                if b"\n" in rest or len(rest) > _MAX_LINE:
                    raise FramingError("chunk size")
                self._part = rest
                self._left = 0
                return -1
            size = int(m[1], 16)
            if size == 0:
                self._mode = self._TRAILER
                end = self._trailer(data[m.end() :], 0)
                return end if end < 0 else end + m.end() - held
            self.chunks += 1
            pos = m.end() + size + 2
        self._left = pos - n
        return -1

    def _trailer(self, data: bytes, pos: int) -> int:
        held = len(self._part)
        if held:
            data = self._part + data
            self._part = b""
        while True:
            end = data.find(b"\r\n", pos)
            if end < 0:
                if len(data) - pos > _MAX_LINE:
                    raise FramingError("trailer")
                self._part = data[pos:]
                return -1
            if end == pos:
                return end + 2 - held
            pos = end + 2


def _framing(head: Head) -> tuple[int, int | None]:
    """How the body is framed (RFC 9112, 6.3), as a mode of BodyTracker, and its declared length. Raises FramingError."""
    coding = head.get(b"transfer-encoding")
    length = head.get(b"content-length")
    if head.status in (204, 304) or head.status < 200:
        return BodyTracker._LENGTH, 0
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None:
            raise FramingError("transfer-encoding")
        return BodyTracker._CHUNKED, None
    if length is not None:
        if not length.isdigit() or [k for k, _ in head.fields].count(b"content-length") > 1:
            raise FramingError("content-length")
        return BodyTracker._LENGTH, int(length)
    return BodyTracker._CLOSE, None


def dechunk(data: bytes) -> bytes:
    """The payload of a complete chunked body."""
    parts: list[bytes] = []
    pos = 0
    while True:
        line = data.index(b"\r\n", pos)
        size = int(data[pos:line].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(data[line + 2 : line + 2 + size])
        pos = line + 4 + size
