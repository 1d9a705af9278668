"""JSON logs on standard error, made and written off the loop. Callers pass ids, names and numbers, never request content."""

from __future__ import annotations

import collections
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import orjson
import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_FLUSH_S = 0.02
_QUEUED = 100_000

Fields = Callable[..., dict[str, Any]]
_Deferred = tuple[float, str, Fields, tuple[Any, ...]]


class _Writer:
    """Takes lines from the loop and writes them from a thread, so that a slow reader of the log stalls nobody.

    A line waits at most _FLUSH_S; lines beyond _QUEUED waiting ones are dropped and counted in ``dropped``, as are those
    that cannot be written.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: collections.deque[bytes | _Deferred] = collections.deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._awake = False
        self._closed = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: bytes | _Deferred) -> None:
        lines = self._lines
        if len(lines) >= _QUEUED:
            self.dropped += 1
            return
        lines.append(line)
        if not self._awake:
            self._awake = True
            self._wake.put(None)

    def close(self) -> None:
        self._closed = True
        self._wake.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        closed = False
        while not closed:
            self._wake.get()
            time.sleep(_FLUSH_S)
            # In this order: whoever appends after the lines were taken finds the thread asleep and wakes it.
            closed = self._closed
            self._awake = False
            data = b"".join([self._text(self._lines.popleft()) for _ in range(len(self._lines))])
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:
                    # Whoever shares the descriptor made it non-blocking.
                    select.select([], [self._fd], [], 1.0)
                except OSError:
                    self.dropped += data.count(b"\n")
                    break

    def _text(self, line: bytes | _Deferred) -> bytes:
        if type(line) is bytes:
            return line
        when, event, fields, args = cast("_Deferred", line)
        try:
            values = fields(*args)
            values["event"], values["level"], values["ts"] = event, "info", when
            return _dumped(values)
        except Exception:
            # It must not end the thread, and with it the log.
            self.dropped += 1
            return b""


class _Logger:
    """structlog's innermost logger: one JSON line a call."""

    def __init__(self, writer: _Writer) -> None:
        self._write = writer.write

    def msg(self, line: bytes) -> None:
        self._write(line)

    debug = info = warning = error = exception = critical = msg


class _Bridge(logging.Handler):
    """Puts the standard library's log records (asyncio's, aiohttp's) on the same stream, without their arguments' content:
    the message template, the exception's type and where it arose."""

    def emit(self, record: logging.LogRecord) -> None:
        exc = record.exc_info[1] if record.exc_info else None
        where = None
        if exc is not None and exc.__traceback__ is not None:
            tb = exc.__traceback__
            while tb.tb_next is not None:
                tb = tb.tb_next
            where = f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}"
        structlog.get_logger().log(
            record.levelno,
            "library",
            source=record.name,
            template=str(record.msg).partition("\n")[0],
            exception=type(exc).__name__ if exc is not None else None,
            where=where,
        )


_writer: _Writer | None = None
_infos = False


def _dumped(event: MutableMapping[str, Any]) -> bytes:
    return orjson.dumps(event, default=str, option=orjson.OPT_APPEND_NEWLINE)


def _line(_: object, method: str, event: MutableMapping[str, Any]) -> bytes:
    """One processor for what structlog's add_log_level, TimeStamper and JSONRenderer do at three times the cost."""
    event["level"] = method
    event["ts"] = time.time()
    return _dumped(event)


def info(event: str, fields: Fields, *args: Any) -> None:
    """The line that structlog's ``info(event, **fields(*args))`` writes, at a fraction of what that costs the loop: fields is
    called, and the new dict that it answers serialised, in the log's thread. args must not change any more, nor hold bodies.
    A line whose fields cannot be had is counted in ``dropped``."""
    if _writer is None:
        structlog.get_logger().info(event, **fields(*args))
    elif _infos:
        _writer.write((time.time(), event, fields, args))


def configure(level: str, fd: int = 2) -> None:
    """Set up logging for the process; may be called again to change the level."""
    global _writer, _infos
    if _writer is None:
        _writer = _Writer(fd)
    number = logging.getLevelNamesMapping()[level.upper()]
    _infos = number <= logging.INFO
    writer = _writer
    structlog.configure(
        processors=[_line],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Logger(writer),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_Bridge()]
    root.setLevel(max(number, logging.WARNING))


def close() -> None:
    """Write what is queued."""
    global _writer
    if _writer is not None:
        _writer.close()
        _writer = None


def dropped() -> int:
    """Lines dropped because the log's reader was too slow."""
    return _writer.dropped if _writer is not None else 0
