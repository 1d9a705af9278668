"""Log lines: JSON, one a call, off the loop; what libraries log comes without its arguments; nothing is lost in silence."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from eldrd.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "MARKER-51c0"


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def lines(self) -> list[dict[str, Any]]:
        """All lines of the log, which is closed by this."""
        logs.close()
        os.close(self.writer)
        self.writer = -1
        data = b""
        while piece := os.read(self.reader, 1 << 16):
            data += piece
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    level = root.level
    logs.close()
    pipe = Pipe()
    yield pipe
    logs.close()
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()
    for fd in (pipe.reader, pipe.writer):
        if fd >= 0:
            os.close(fd)


def test_lines(pipe: Pipe) -> None:
    logs.configure("info", pipe.writer)
    log = structlog.get_logger()
    log.info("request", id="r", n=1, none=None, nested={"a": [1.5]})
    log.debug("not written")
    log.error("bad")
    first, second = pipe.lines()
    assert (first["event"], first["level"], first["id"], first["nested"]) == ("request", "info", "r", {"a": [1.5]})
    assert abs(first["ts"] - time.time()) < 60
    assert (second["event"], second["level"]) == ("bad", "error")


def test_level_can_change_while_it_runs(pipe: Pipe) -> None:
    logs.configure("warning", pipe.writer)
    log = structlog.get_logger()
    log.info("a")
    logs.configure("debug")
    log.debug("b")
    logs.configure("error")
    log.warning("c")
    assert [line["event"] for line in pipe.lines()] == ["b"]


def test_values_of_any_kind(pipe: Pipe) -> None:
    logs.configure("info", pipe.writer)
    structlog.get_logger().info("x", error=ValueError("e"), path=os, text="a\nb\u2028\x00")
    (line,) = pipe.lines()
    assert line["text"] == "a\nb\u2028\x00"


def test_libraries_log_without_content(pipe: Pipe) -> None:
    logs.configure("debug", pipe.writer)
    library = logging.getLogger("aiohttp.server")
    library.error("Error handling %s", SECRET)
    try:
        raise ValueError(SECRET)
    except ValueError:
        library.exception("Unhandled exception\n%s", SECRET)
    library.info("not written")
    first, second = pipe.lines()
    assert (first["source"], first["template"], first["level"]) == ("aiohttp.server", "Error handling %s", "error")
    assert (second["exception"], second["template"]) == ("ValueError", "Unhandled exception")
    assert second["where"].rpartition(":")[0].endswith("test_logs.py")
    assert SECRET not in json.dumps([first, second])


def test_a_slow_reader_costs_lines_not_time(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_QUEUED", 100)
    logs.configure("info", pipe.writer)
    log = structlog.get_logger()
    text = "x" * 10_000
    start = time.monotonic()
    for _ in range(400):
        log.info("line", text=text)
    assert time.monotonic() - start < 30
    dropped = logs.dropped()
    # Of 400 lines six fit into the pipe, a hundred wait in the line and as many are in the thread's hands.
    assert dropped >= 190
    os.set_blocking(pipe.reader, False)
    kept, data = 0, b""
    end = time.monotonic() + 60
    while kept + dropped < 400 and time.monotonic() < end:
        try:
            data += os.read(pipe.reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
        kept = data.count(b"\n")
    assert kept + dropped == 400


def test_a_descriptor_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer, False)
    fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, 4096)
    logs.configure("info", pipe.writer)
    for i in range(20):
        structlog.get_logger().info("line", i=i, text="x" * 1000)
    data = b""
    end = time.monotonic() + 60
    while data.count(b"\n") < 20 and time.monotonic() < end:
        data += os.read(pipe.reader, 1 << 16)
    assert [json.loads(line)["i"] for line in data.splitlines()] == list(range(20))
    assert logs.dropped() == 0


def test_lines_that_nobody_can_get_are_counted(pipe: Pipe) -> None:
    os.close(pipe.reader)
    pipe.reader = -1
    logs.configure("info", pipe.writer)
    for _ in range(5):
        structlog.get_logger().info("line")
    end = time.monotonic() + 60
    while logs.dropped() < 5 and time.monotonic() < end:
        time.sleep(0.005)
    assert logs.dropped() == 5


def test_deferred_lines_are_those_of_structlog(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5)
    values = {"id": "r", "n": 1, "none": None, "nested": {"a": [1.5]}, "text": "a\nb\u2028", "other": os}
    logs.configure("info", pipe.writer)
    structlog.get_logger().info("request", **values)
    logs.info("request", dict, values)
    logs.info("request", lambda n, text: {"n": n, "text": text}, 2, "x")
    first, second, third = pipe.lines()
    assert list(first.items()) == list(second.items())
    assert third == {"n": 2, "text": "x", "event": "request", "level": "info", "ts": 1.5}


def test_deferred_lines_obey_the_level(pipe: Pipe) -> None:
    logs.configure("warning", pipe.writer)
    logs.info("not written", dict)
    logs.configure("debug", pipe.writer)
    logs.info("written", dict)
    assert [line["event"] for line in pipe.lines()] == ["written"]
    with structlog.testing.capture_logs() as lines:
        logs.info("by structlog", lambda n: {"n": n}, 1)
    assert lines == [{"event": "by structlog", "n": 1, "log_level": "info"}]


def test_a_line_that_cannot_be_made_is_counted_and_ends_nothing(pipe: Pipe) -> None:
    logs.configure("info", pipe.writer)
    logs.info("bad", lambda values: {"first": values[0]}, [])
    logs.info("bad", lambda: {"nested": {1: "not a key of JSON"}})
    logs.info("good", dict)
    end = time.monotonic() + 60
    while logs.dropped() < 2 and time.monotonic() < end:
        time.sleep(0.005)
    assert logs.dropped() == 2
    assert [line["event"] for line in pipe.lines()] == ["good"]


def test_a_line_that_comes_while_others_are_taken_waits_for_no_further_one(pipe: Pipe) -> None:
    logs.configure("info", pipe.writer)

    def late() -> dict[str, Any]:
        logs.info("second", dict)
        return {}

    logs.info("first", late)
    data = b""
    while data.count(b"\n") < 2:
        assert select.select([pipe.reader], [], [], 60.0)[0], "the second line was not written"
        data += os.read(pipe.reader, 1 << 16)
    assert [json.loads(line)["event"] for line in data.splitlines()] == ["first", "second"]


def test_lines_of_several_threads_all_come(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FLUSH_S", 0.0)
    fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, 1 << 20)
    logs.configure("info", pipe.writer)

    def some(name: int) -> None:
        for i in range(1000):
            logs.info("line", dict, {"name": name, "i": i})

    threads = [threading.Thread(target=some, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = pipe.lines()
    for name in range(3):
        assert [line["i"] for line in lines if line["name"] == name] == list(range(1000))


def test_close_writes_the_rest(pipe: Pipe) -> None:
    logs.configure("info", pipe.writer)
    for i in range(1000):
        structlog.get_logger().info("line", i=i)
    assert [line["i"] for line in pipe.lines()] == list(range(1000))
    assert logs.dropped() == 0
