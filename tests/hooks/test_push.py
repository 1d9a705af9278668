"""The pushing thread over real ZMQ: hello, rows and records, daemons that restart, `want`, `who`, and a full queue."""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zmq
from eldrd_hook import push
from eldrd_hook import wire as hook
from eldrd_hook.attribution import Counted, Record
from eldrd_hook.push import Pusher, Rows

from eldrd.signatures import wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = hook.Hello(1, "0.1.0", "p0", "prefill", "tiny", 5, [0, 1], 4, 2, 32, "sha256")
WIDTH = 8
GEOMETRY = wire.Hello(1, "0.1.0", "p0", "prefill", "tiny", 5, [0, 1], 4, 2, 32, "sha256").geometry()


class Router:
    """A daemon's socket, used by hand."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.peer = b""

    def hear(self, timeout: float = 60.0) -> tuple[wire.Header, list[bytes]]:
        assert self.socket.poll(int(timeout * 1000)), "nothing came"
        self.peer, *frames = self.socket.recv_multipart()
        return wire.decode_header(frames[0]), frames

    def silent(self, seconds: float = 0.1) -> bool:
        return not self.socket.poll(int(seconds * 1000))

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def close(self) -> None:
        self.context.destroy(0)


def counted(*hashes: int, records: tuple[Record, ...] = ()) -> Counted:
    rows = np.array([[h % 200] * WIDTH for h in hashes], np.uint8).reshape(len(hashes), WIDTH)
    return Counted(np.array(hashes, hook.HASH), rows, list(records))


def record(key: str, *hashes: int, tail: int = 3) -> Record:
    return Record(key, 32 * len(hashes) + tail, np.array(hashes, hook.HASH), tail, np.full(WIDTH, 9, np.uint8), False)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/signatures"


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    router = Router(endpoint)
    yield router
    router.close()


@pytest.fixture
def pusher(endpoint: str) -> Iterator[Pusher]:
    pusher = Pusher([endpoint], HELLO, hello_seconds=30)
    pusher.start()
    yield pusher
    pusher.close()


def test_hello_comes_first_then_rows_then_the_record(router: Router, pusher: Pusher) -> None:
    header, _ = router.hear()
    assert isinstance(header, wire.Hello)
    geometry = header.geometry()
    assert geometry.shape == (2, 4)
    pusher.push(counted(1, 2, records=(record("r", 1, 2),)))
    blocks, frames = router.hear()
    assert isinstance(blocks, wire.Blocks)
    assert (blocks.seq, wire.hashes(frames, blocks.n).tolist()) == (0, [1, 2])
    assert wire.counts(frames, blocks.n, blocks.dtype, geometry).tolist() == [[1] * WIDTH, [2] * WIDTH]
    request, frames = router.hear()
    assert request == wire.Request(1, 1, "r", 67, 2, 3, False, "u1")
    assert wire.hashes(frames, 2).tolist() == [1, 2]
    assert wire.counts(frames, 1, "u1", geometry).tolist() == [[9] * WIDTH]


def test_hello_is_repeated_and_answers_who(router: Router, endpoint: str) -> None:
    pusher = Pusher([endpoint], HELLO, hello_seconds=0.1)
    pusher.start()
    for _ in range(3):
        assert isinstance(router.hear()[0], wire.Hello)
    pusher.close()
    while not router.silent():
        router.hear()
    quiet = Pusher([endpoint], HELLO, hello_seconds=30)
    quiet.start()
    router.hear()
    assert router.silent()
    router.say(*wire.encode(wire.Who(1)))
    assert isinstance(router.hear()[0], wire.Hello)
    quiet.close()


def test_want_is_answered_from_the_rows_kept(router: Router, pusher: Pusher) -> None:
    router.hear()
    pusher.push(counted(1, 2, 3))
    router.hear()
    router.say(*wire.encode(wire.Want(1, 3), np.array([3, 99, 1], wire.HASH)))
    header, frames = router.hear()
    assert isinstance(header, wire.Blocks)
    assert wire.hashes(frames, header.n).tolist() == [3, 1]
    assert [row[0] for row in wire.counts(frames, 2, "u1", GEOMETRY)] == [3, 1]
    router.say(*wire.encode(wire.Want(1, 1), np.array([99], wire.HASH)))
    assert router.silent()


def test_nonsense_from_a_daemon_changes_nothing(router: Router, pusher: Pusher) -> None:
    router.hear()
    router.say(b"\xc1nonsense")
    pusher.push(counted(4))
    assert isinstance(router.hear()[0], wire.Blocks)


def test_a_restarted_daemon_gets_hello_and_what_it_wants(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()

    class Link(push._Link):
        def events(self) -> None:
            before = self.connected
            super().events()
            if before and not self.connected:
                gone.set()

    monkeypatch.setattr(push, "_Link", Link)
    pusher = Pusher([endpoint], HELLO, hello_seconds=30)
    pusher.start()
    first = Router(endpoint)
    first.hear()
    pusher.push(counted(1))
    first.hear()
    first.close()
    assert gone.wait(60)
    pusher.push(counted(2, records=(record("while away", 1, 2),)))
    while pusher._queue:
        time.sleep(0.005)
    second = Router(endpoint)
    header, _ = second.hear()
    assert isinstance(header, wire.Hello)
    assert second.silent(), "what nobody could receive is not sent late"
    second.say(*wire.encode(wire.Want(1, 2), np.array([1, 2], wire.HASH)))
    blocks, frames = second.hear()
    assert isinstance(blocks, wire.Blocks)
    assert (blocks.seq, wire.hashes(frames, 2).tolist()) == (0, [1, 2])
    pusher.close()
    second.close()


def test_several_daemons_get_the_same(tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"]
    routers = [Router(e) for e in endpoints]
    pusher = Pusher(endpoints, HELLO)
    pusher.start()
    for r in routers:
        r.hear()
    pusher.push(counted(1, 2))
    assert routers[0].hear()[1] == routers[1].hear()[1]
    pusher.close()
    for r in routers:
        r.close()


def test_a_full_queue_drops_counts_and_keeps_the_rows(router: Router, endpoint: str) -> None:
    pusher = Pusher([endpoint], HELLO, queue_bytes=200)
    took = []
    for h in range(10):  # the thread has not started: nothing leaves the queue
        began = time.monotonic()
        pusher.push(counted(h))
        took.append(time.monotonic() - began)
    assert statistics.median(took) < 0.1
    assert 0 < pusher.dropped < 10
    pusher.start()
    router.hear()
    got = []
    while not router.silent():
        got.append(router.hear()[0])
    assert len(got) + pusher.dropped <= 10
    router.say(*wire.encode(wire.Want(1, 1), np.array([9], wire.HASH)))
    header, _ = router.hear()
    assert isinstance(header, wire.Blocks)
    pusher.close()


def test_a_daemon_that_does_not_read_costs_messages_not_time(endpoint: str) -> None:
    router = Router(endpoint)
    pusher = Pusher([endpoint], HELLO, queue_bytes=1 << 20)
    pusher.start()
    began = time.monotonic()
    for h in range(20_000):
        pusher.push(counted(h))
    assert time.monotonic() - began < 60
    pusher.close()
    router.close()
    assert not pusher._thread.is_alive()


def test_close_ends_the_thread_without_a_daemon(tmp_path: Path) -> None:
    pusher = Pusher([f"ipc://{tmp_path}/nobody"], HELLO)
    pusher.start()
    pusher.push(counted(1))
    pusher.close()
    assert not pusher._thread.is_alive()


def test_rows_first_write_wins_and_the_oldest_goes() -> None:
    rows = Rows(budget=3 * WIDTH)
    rows.add(np.array([1, 2, 3], hook.HASH), np.ones((3, WIDTH), np.uint8))
    kept = rows.add(np.array([1, 4], hook.HASH), np.full((2, WIDTH), 7, np.uint8))
    assert kept[:, 0].tolist() == [1, 7]
    assert [h for h, _ in rows.find(np.array([1, 2, 3, 4], hook.HASH))] == [1, 3, 4]


def test_totals_of_steps_are_sent_in_the_connections_order(router: Router, pusher: Pusher) -> None:
    assert isinstance(router.hear()[0], wire.Hello)
    pusher.push(counted(1))
    pusher.push_steps(hook.Steps(1, 0, 3, 9, 12, 40, 1))
    assert isinstance(router.hear()[0], wire.Blocks)
    header, frames = router.hear()
    assert header == wire.Steps(v=1, seq=1, steps=3, requests=9, tokens=12, active=40, missed=1)
    assert len(frames) == 1
