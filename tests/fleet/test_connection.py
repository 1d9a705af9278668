"""Connections to workers that misbehave: what an exchange ends in, and which connections are used again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from eldrd.fleet import connection as c
from eldrd.fleet import pool as pool_module
from eldrd.fleet.connection import Connection, UpstreamError
from eldrd.fleet.pool import ConnectionPool, IdleWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

REQUEST = [b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n", b"{}"]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"5\r\nhello\r\n"
END = b"0\r\n\r\n"


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The daemon runs on uvloop, whose transports differ in what they forgive."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


class Server:
    """A worker whose every connection runs ``script`` once; keeps what it was sent and which connections it saw end."""

    def __init__(self) -> None:
        self.script: Script = answer(OK)
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = asyncio.Event()
        self.pool: ConnectionPool
        self.errors: list[dict[str, Any]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            # uvloop's writer raises RuntimeError once the peer has gone.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, RuntimeError):
                await self.script(reader, writer)
                await reader.read()
        finally:
            self.ended.set()
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head + await reader.readexactly(2))


def answer(*pieces: bytes, close: bool = False, reset: bool = False, pause_s: float = 0.01) -> Script:
    """After one request, write the pieces with a pause between them; then close or reset."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        for i, piece in enumerate(pieces):
            if i:
                await asyncio.sleep(pause_s)
            writer.write(piece)
        if reset:
            writer.transport.abort()
        elif close:
            writer.close()

    return script


def answers(*each: bytes) -> Script:
    """One whole answer a request, on one connection."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in each:
            await reader.readuntil(b"{}")
            writer.write(piece)

    return script


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    s = Server()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: s.errors.append(context))
    listener = await asyncio.start_server(s.connected, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    s.pool = ConnectionPool(f"http://127.0.0.1:{port}", 60.0)
    yield s
    s.pool.close()
    listener.close()
    await asyncio.sleep(0.01)
    assert s.errors == []


async def exchange(pool: ConnectionPool, timeout_s: float = 60.0) -> tuple[int, bytes, Connection]:
    connection = await pool.get()
    head = await connection.send(REQUEST, timeout_s)
    return head.status, await connection.collect(60.0, 1 << 20), connection


async def fails(pool: ConnectionPool, timeout_s: float = 60.0) -> UpstreamError:
    with pytest.raises(UpstreamError) as e:
        await exchange(pool, timeout_s)
    return e.value


def idle(pool: ConnectionPool) -> int:
    return len(pool._idle)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110, nothing tells
            await asyncio.sleep(0.002)


# -- heads --------------------------------------------------------------------------------------------------------------


async def test_refused(server: Server) -> None:
    pool = ConnectionPool("http://127.0.0.1:1", 1.0)
    e = await fails(pool)
    assert (e.phase, e.cause, e.answered, e.stale) == ("connect", "refused", False, False)


async def test_unknown_name_is_refused(server: Server) -> None:
    e = await fails(ConnectionPool("http://no-such-host.invalid:80", 5.0))
    assert (e.phase, e.cause) == ("connect", "refused")


@pytest.mark.parametrize(
    ("script", "answered"),
    [
        (answer(reset=True), False),
        (answer(close=True), False),
        (answer(b"HTTP/1.1 200 O", reset=True), True),
        (answer(b"HTTP/1.1 200 O", close=True), True),
        (answer(b"HTTP/1.1 100 Continue\r\n\r\n", close=True), False),
    ],
)
async def test_lost_before_the_head(server: Server, script: Script, answered: bool) -> None:
    server.script = script
    e = await fails(server.pool)
    assert (e.phase, e.cause, e.answered, e.stale) == ("first_byte", "reset", answered, False)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nbad field\r\n\r\n",
        b"SPDY\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"x" * (c.MAX_HEAD + 1),
    ],
)
async def test_a_head_that_is_none(server: Server, head: bytes) -> None:
    server.script = answer(head)
    e = await fails(server.pool)
    assert (e.phase, e.cause) == ("first_byte", "framing")
    await asyncio.wait_for(server.ended.wait(), 60)


@pytest.mark.parametrize("cut", range(1, len(OK), 7))
async def test_a_head_in_pieces_after_interim_ones(server: Server, cut: int) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    server.script = answer(b"HTTP/1.1 100 Continue\r\n\r\n" + interim + OK[:cut], OK[cut:])
    status, body, connection = await exchange(server.pool)
    assert (status, body) == (200, b"ok")
    connection.release()
    assert idle(server.pool) == 1


async def test_thousands_of_interim_heads(server: Server) -> None:
    server.script = answer(b"HTTP/1.1 100 Continue\r\n\r\n" * 5000 + OK)
    assert (await exchange(server.pool))[:2] == (200, b"ok")


async def test_silence_before_the_head(server: Server) -> None:
    server.script = answer()
    e = await fails(server.pool, 0.05)
    assert (e.phase, e.cause, e.answered, e.stale) == ("first_byte", "timeout", False, False)
    await asyncio.wait_for(server.ended.wait(), 60)


async def test_cancelled_before_the_head(server: Server) -> None:
    server.script = answer()
    connection = await server.pool.get()
    task = asyncio.ensure_future(connection.send(REQUEST, 5.0))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    connection.release()
    await asyncio.wait_for(server.ended.wait(), 60)
    assert idle(server.pool) == 0


# -- bodies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([OK], b"ok"),
        ([OK[:-1], OK[-1:]], b"ok"),
        ([STREAM + CHUNK + END], b"hello"),
        ([STREAM, CHUNK[:4], CHUNK[4:] + END[:2], END[2:]], b"hello"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    ],
)
async def test_whole_bodies_keep_the_connection(server: Server, pieces: list[bytes], body: bytes) -> None:
    server.script = answer(*pieces)
    _, got, connection = await exchange(server.pool)
    assert got == body
    connection.release()
    assert idle(server.pool) == 1


async def test_body_ended_by_close(server: Server) -> None:
    server.script = answer(b"HTTP/1.1 200 OK\r\n\r\nall", b" of it", close=True)
    _, body, connection = await exchange(server.pool)
    assert body == b"all of it"
    connection.release()
    assert idle(server.pool) == 0


async def test_body_ended_by_close_but_reset(server: Server) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import socket
        import struct

        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await asyncio.sleep(0.02)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    server.script = script
    e = await fails(server.pool)
    assert (e.phase, e.cause, e.answered) == ("body", "reset", True)


@pytest.mark.parametrize("body", [OK[:-1], STREAM + CHUNK, STREAM + CHUNK[:4], STREAM + CHUNK + b"0\r\n"])
async def test_lost_in_the_body(server: Server, body: bytes) -> None:
    server.script = answer(body, close=True)
    e = await fails(server.pool)
    assert (e.phase, e.cause, e.answered, e.stale) == ("body", "reset", True, False)


async def test_framing_lost_in_the_body(server: Server) -> None:
    server.script = answer(STREAM + CHUNK + b"zz\r\n")
    e = await fails(server.pool)
    assert (e.phase, e.cause) == ("body", "framing")
    await asyncio.wait_for(server.ended.wait(), 60)


@pytest.mark.parametrize("pieces", [[OK[:-2], OK[-2:]], [STREAM, CHUNK + END], [STREAM + CHUNK, END]])
async def test_too_large(server: Server, pieces: list[bytes]) -> None:
    server.script = answer(*pieces)
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    with pytest.raises(UpstreamError) as e:
        await connection.collect(60.0, 1)
    assert (e.value.phase, e.value.cause) == ("body", "too_large")
    connection.release()
    assert idle(server.pool) == 0


async def test_a_relay_does_not_acknowledge_each_piece_by_itself(server: Server) -> None:
    server.script = answer(STREAM + CHUNK, CHUNK + END)
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    assert connection.transport is not None
    option = connection.transport.get_extra_info("socket").getsockopt
    assert option(socket.IPPROTO_TCP, socket.TCP_QUICKACK)
    done = connection.relay(lambda _: None)
    assert not option(socket.IPPROTO_TCP, socket.TCP_QUICKACK)
    await done


async def test_relay_hands_on_every_byte(server: Server) -> None:
    server.script = answer(STREAM + CHUNK[:3], CHUNK[3:], CHUNK + END)
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    await asyncio.sleep(0.015)
    got: list[bytes] = []
    await connection.relay(got.append)
    assert b"".join(got) == CHUNK + CHUNK + END
    assert connection.progress >= 2
    connection.release()
    assert idle(server.pool) == 1


# -- using connections again --------------------------------------------------------------------------------------------


async def test_a_kept_connection_is_used_again(server: Server) -> None:
    server.script = answers(OK, STREAM + CHUNK + END, OK)
    for expected in (b"ok", b"hello", b"ok"):
        _, body, connection = await exchange(server.pool)
        assert body == expected
        connection.release()
    assert server.connections == 1
    assert connection.reused


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nconnection: close\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: Close\r\n"]
)  # fmt: skip
async def test_not_kept_where_the_worker_says_so(server: Server, head: bytes) -> None:
    server.script = answer(head + b"content-length: 2\r\n\r\nok")
    _, body, connection = await exchange(server.pool)
    connection.release()
    assert body == b"ok"
    assert idle(server.pool) == 0


@pytest.mark.parametrize("body", [OK, STREAM + CHUNK + END, STREAM + CHUNK + b"0\r\na: b\r\n\r\n"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong", b"HTTP/1.1 40", b"a: b\r\n"])
async def test_bytes_after_the_end_are_nobodys(server: Server, body: bytes, split: bool, extra: bytes) -> None:
    """An answer to nothing must not be taken for the next request's."""
    server.script = answer(body, extra) if split else answer(body + extra)
    _, got, connection = await exchange(server.pool)
    assert got in (b"ok", b"hello")
    connection.release()
    await until(lambda: idle(server.pool) == 0)
    server.script = answer(OK)
    assert (await exchange(server.pool))[1] == b"ok"
    assert server.connections == 2


@pytest.mark.parametrize("body", [OK, STREAM + CHUNK + END])
async def test_bytes_after_the_end_before_the_release(server: Server, body: bytes) -> None:
    sent = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(body, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")(reader, writer)
        sent.set()

    server.script = script
    _, got, connection = await exchange(server.pool)
    assert got in (b"ok", b"hello")
    await sent.wait()
    await asyncio.sleep(0.02)
    connection.release()
    server.script = answer(OK)
    assert (await exchange(server.pool))[1] == b"ok"
    assert server.connections == 2


@pytest.mark.parametrize("when", ["head", "relay", "collect"])
async def test_released_in_the_middle_is_closed(server: Server, when: str) -> None:
    """A client that leaves early must not leave its stream to the next request; the worker sees the disconnect."""
    server.script = answer(STREAM + CHUNK)
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    if when != "head":
        work: Any = connection.collect(5.0, 100) if when == "collect" else connection.relay(lambda _: None)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    connection.release()
    await asyncio.wait_for(server.ended.wait(), 60)
    assert idle(server.pool) == 0


async def test_age_limit_of_idle_connections(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_IDLE_S", 0.05)
    server.script = answers(OK, OK)
    for _ in range(2):
        connection = (await exchange(server.pool))[2]
        connection.release()
        await asyncio.sleep(0.08)
    assert server.connections == 2
    await asyncio.wait_for(server.ended.wait(), 60)


async def test_put_closes_what_is_too_old(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_IDLE_S", 0.05)
    server.script = answers(OK, OK)
    first, second = (await exchange(server.pool))[2], (await exchange(server.pool))[2]
    first.release()
    await asyncio.sleep(0.08)
    second.release()
    assert idle(server.pool) == 1
    await asyncio.wait_for(server.ended.wait(), 60)


async def test_idle_connection_closed_by_the_worker_is_forgotten(server: Server) -> None:
    server.script = answer(OK, close=True)
    (await exchange(server.pool))[2].release()
    await until(lambda: idle(server.pool) == 0)


async def test_stale_connection_says_so_and_takes_its_kin_along(server: Server) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(OK)
        await reader.readuntil(b"{}")
        writer.transport.abort()

    server.script = once
    both = [(await exchange(server.pool))[2] for _ in range(2)]
    for connection in both:
        connection.release()
    e = await fails(server.pool)
    assert (e.phase, e.cause, e.answered, e.stale) == ("first_byte", "reset", False, True)
    assert idle(server.pool) == 0


async def test_reused_connection_lost_after_a_part_is_not_stale(server: Server) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(OK)
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 2")
        await asyncio.sleep(0.01)
        writer.close()

    server.script = script
    (await exchange(server.pool))[2].release()
    e = await fails(server.pool)
    assert (e.answered, e.stale) == (True, False)


async def test_newest_idle_connection_first(server: Server) -> None:
    server.script = answers(OK, OK)
    first, second = (await exchange(server.pool))[2], (await exchange(server.pool))[2]
    first.release()
    second.release()
    assert await server.pool.get() is second
    assert await server.pool.get() is first
    for connection in (first, second):
        connection.abort()


async def test_closed_pool_keeps_nothing(server: Server) -> None:
    connection = (await exchange(server.pool))[2]
    server.pool.close()
    connection.release()
    assert idle(server.pool) == 0
    await asyncio.wait_for(server.ended.wait(), 60)


# -- flow control and the idle watch ------------------------------------------------------------------------------------


async def test_pause_and_resume(server: Server) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1

    server.script = flood
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    total = 0

    def take(data: bytes) -> None:
        nonlocal total
        total += len(data)

    done = connection.relay(take)
    connection.pause()
    connection.pause()
    await asyncio.sleep(0.2)
    before = total
    await asyncio.sleep(0.1)
    assert total == before
    assert sent < 32
    connection.resume()
    await asyncio.wait_for(done, 60)
    assert total == 64 << 20
    connection.release()
    assert idle(server.pool) == 1


async def test_released_while_paused_reads_again(server: Server) -> None:
    server.script = answers(OK, OK)
    connection = (await exchange(server.pool))[2]
    connection.pause()
    connection.release()
    assert (await exchange(server.pool))[1] == b"ok"


async def test_pause_after_the_end_of_the_connection(server: Server) -> None:
    server.script = answer(STREAM + CHUNK)
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    connection.abort()
    connection.pause()
    connection.resume()
    await asyncio.sleep(0.01)
    connection.pause()


async def watched(server: Server, idle_s: float, *, pause: bool) -> UpstreamError:
    watch = IdleWatch(idle_s)
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    done = connection.relay(lambda _: None)
    if pause:
        connection.pause()
    watch.add(connection)
    with pytest.raises(UpstreamError) as e:
        await asyncio.wait_for(done, 60)
    watch.remove(connection)
    assert len(watch) == 0
    return e.value


async def test_silent_worker(server: Server) -> None:
    server.script = answer(STREAM + CHUNK)
    e = await watched(server, 0.1, pause=False)
    assert (e.phase, e.cause) == ("body", "timeout")
    await asyncio.wait_for(server.ended.wait(), 60)


async def test_stalled_client(server: Server) -> None:
    server.script = answer(STREAM + CHUNK, *[CHUNK] * 100)
    e = await watched(server, 0.1, pause=True)
    assert (e.phase, e.cause) == ("body", "stalled")


async def test_progress_is_no_silence(server: Server) -> None:
    server.script = answer(STREAM, *[CHUNK] * 40, END, pause_s=0.05)
    watch = IdleWatch(1.5)
    connection = await server.pool.get()
    await connection.send(REQUEST, 60.0)
    done = connection.relay(lambda _: None)
    watch.add(connection)
    await asyncio.wait_for(done, 60)
    watch.remove(connection)


async def test_connect_timeout(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return never if name == "create_connection" else getattr(loop, name)

    monkeypatch.setattr(c.asyncio, "get_running_loop", Slow)
    server.pool.connect_timeout_s = 0.05
    with pytest.raises(UpstreamError) as e:
        await server.pool.get()
    assert (e.value.phase, e.value.cause) == ("connect", "timeout")


class Nowhere:
    """A transport that takes everything, and its options."""

    def get_extra_info(self, name: str) -> Nowhere:
        assert name == "socket"
        return self

    def setsockopt(self, *_: int) -> None: ...

    def write(self, _: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...


@given(
    st.lists(st.binary(min_size=1, max_size=40) | st.binary(min_size=4090, max_size=4100), max_size=8),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
async def test_relay_of_any_chunks_in_any_pieces(parts: list[bytes], cuts: list[int], whole: bool) -> None:
    """Whole chunks take a shortcut past the tracker: bytes, chunks and the end come out the same."""
    chunks = [b"%x\r\n%b\r\n" % (len(p), p) for p in parts]
    body = b"".join(chunks) + END
    edges = sorted({0, len(body), *(c for c in cuts if c < len(body))})
    pieces = [*chunks, END] if whole else [body[a:b] for a, b in pairwise(edges)]
    connection = Connection(ConnectionPool("http://127.0.0.1:1", 1.0), asyncio.get_running_loop())
    connection.connection_made(Nowhere())  # type: ignore[arg-type]
    head = connection.send(REQUEST, 60.0)
    connection.data_received(STREAM)
    assert (await head).status == 200
    got: list[bytes] = []
    done = connection.relay(got.append)
    before = connection.progress
    for piece in pieces:
        assert not connection.complete
        connection.data_received(piece)
        assert connection.progress > before
        before = connection.progress
    await done
    assert b"".join(got) == body
    assert connection.complete
    assert connection.tracker is not None
    assert connection.tracker.chunks == len(parts)
    assert body.endswith(b"".join(connection.tail))
