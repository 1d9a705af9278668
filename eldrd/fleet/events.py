"""From the bytes of a chunked answer to its server-sent events, for answers that must be rewritten. Pure; no sockets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from eldrd.fleet.framing import FramingError

if TYPE_CHECKING:
    from eldrd.fleet.framing import BodyTracker, Head

DONE: Final = b"[DONE]"
_BLANK_LINE = re.compile(rb"(?:\r?\n){2}")
_MAX_LINE: Final = 4_096


class ChunkDecoder:
    """Takes a chunked body off its coding (RFC 9112, 7.1), piece by piece. What follows the last chunk is ignored."""

    __slots__ = ("_buffer", "_left", "_over")

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0
        self._over = False

    def feed(self, data: bytes) -> bytes:
        """The payload bytes in the next piece. Raises FramingError."""
        data = self._buffer + data
        self._buffer = b""
        payload = []
        pos = 0
        while not self._over:
            if self._left > 2:
                take = data[pos : pos + self._left - 2]
                payload.append(take)
                pos += len(take)
                self._left -= len(take)
            if pos >= len(data):
                break
            if self._left:
                # The CRLF after a chunk, perhaps in two pieces.
                skipped = min(self._left, len(data) - pos)
                pos += skipped
                self._left -= skipped
                continue
            end = data.find(b"\r\n", pos)
            if end < 0:
                if len(data) - pos > _MAX_LINE:
                    raise FramingError("chunk size")
                self._buffer = data[pos:]
                break
            try:
                size = int(data[pos:end].split(b";")[0], 16)
            except ValueError:
                raise FramingError("chunk size") from None
            pos = end + 2
            self._over = size == 0
            self._left = size + 2
        return b"".join(payload)


class EventSplitter:
    """Cuts a server-sent event stream into the data of its events; fields other than data are dropped."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, payload: bytes) -> list[bytes]:
        """The data of each event that the next piece completes."""
        # What is kept stays as it came: a line feed's return may be half of what follows.
        *whole, self._rest = _BLANK_LINE.split(self._rest + payload)
        return [data for event in whole if (data := _data(event))]


def _data(event: bytes) -> bytes:
    lines = (line for line in event.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def between_events(head: Head, tracker: BodyTracker, tail: bytes) -> bool:
    """Whether an event of eldrd's own can follow what has been relayed: chunks may end inside an event, and into a
    compressed stream nothing can be put. tail: the last bytes relayed."""
    if head.get(b"content-encoding") is not None or not tracker.between_chunks:
        return False
    return tracker.chunks == 0 or tail.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n"))
