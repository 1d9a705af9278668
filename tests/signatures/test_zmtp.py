"""The ZMTP listener behind real ZMQ sockets, raw ones, and bytes cut anywhere, on asyncio's loop and on uvloop's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, cast

import pytest
import uvloop
import zmq
import zmq.asyncio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eldrd.signatures import zmtp
from eldrd.signatures.zmtp import Connection, Listener
from loadgen.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from eldrd.signatures.zmtp import Frame

NULL = b"NULL".ljust(20, b"\0")


def greeting(major: int = 3, minor: int = 1, mechanism: bytes = NULL) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + bytes((major, minor)) + mechanism + bytes(32)


def frame(body: bytes, flags: int = 0, *, long: bool = False) -> bytes:
    if long or len(body) > 255:
        return struct.pack(">BQ", flags | 2, len(body)) + body
    return bytes((flags, len(body))) + body


def message(*frames: bytes) -> bytes:
    return b"".join(frame(f, int(i < len(frames) - 1)) for i, f in enumerate(frames))


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes((len(name),)) + name + body, 4)


def ready(kind: bytes = b"DEALER", more: bytes = b"") -> bytes:
    return command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind + more)


HANDSHAKE = greeting() + ready()
ANSWER = greeting() + ready(b"ROUTER", b"\x08Identity" + bytes(4))


class Bench:
    """A listener and what it was told."""

    def __init__(self, endpoint: str = "") -> None:
        self.messages: list[list[bytes]] = []
        self.froms: list[Connection] = []
        self.refused: list[str] = []
        self.listener = Listener(self._received, lambda _, problem: self.refused.append(problem))
        self.endpoint = self.listener.start(endpoint or f"tcp://127.0.0.1:{free_port()}")
        self.context = zmq.asyncio.Context()
        self.errors: list[dict[str, Any]] = []

    def _received(self, connection: Connection, frames: list[Frame]) -> None:
        self.messages.append([bytes(f) for f in frames])
        self.froms.append(connection)

    def socket(self, kind: int = zmq.DEALER, **options: int | bytes) -> zmq.asyncio.Socket:
        peer = self.context.socket(kind)
        peer.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            peer.setsockopt(getattr(zmq, name), value)
        peer.connect(self.endpoint)
        return peer

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", int(self.endpoint.rsplit(":", 1)[1]))

    async def until(self, n: int) -> None:
        async with asyncio.timeout(60):
            while len(self.messages) < n:  # noqa: ASYNC110, nothing tells
                await asyncio.sleep(0.002)

    def close(self) -> None:
        self.listener.close()
        self.context.destroy(linger=0)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return cast("asyncio.AbstractEventLoopPolicy", request.param())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bench.errors.append(context))
    yield bench
    bench.close()
    await asyncio.sleep(0.01)
    assert not bench.listener.connections
    assert bench.errors == []


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 5 << 20])
async def test_messages_go_both_ways(bench: Bench, size: int) -> None:
    peer = bench.socket()
    body = os.urandom(size)
    await peer.send_multipart([b"head", body, b"", body])
    await peer.send_multipart([body])
    await bench.until(2)
    assert bench.messages == [[b"head", body, b"", body], [body]]
    assert bench.froms[0].address == "127.0.0.1"
    assert bench.froms[0].send([b"head", body, b""])
    assert bench.froms[0].send([body])
    assert await asyncio.wait_for(peer.recv_multipart(), 60) == [b"head", body, b""]
    assert await asyncio.wait_for(peer.recv_multipart(), 60) == [body]
    assert bench.refused == []


async def test_many_messages_of_many_peers_stay_in_order(bench: Bench) -> None:
    peers = [bench.socket(ROUTING_ID=f"p{i}".encode()) for i in range(4)]
    for n in range(500):
        for i, peer in enumerate(peers):
            await peer.send_multipart([b"%d" % i, b"%d" % n, bytes(n * 20)])
    await bench.until(2000)
    for i in range(4):
        mine = [m for m in bench.messages if m[0] == b"%d" % i]
        assert [m[1:] for m in mine] == [[b"%d" % n, bytes(n * 20)] for n in range(500)]
    assert len(set(bench.froms)) == 4


@pytest.mark.parametrize("minor", [0, 1, 7])
async def test_byte_by_byte(bench: Bench, minor: int) -> None:
    reader, writer = await bench.raw()
    cast("socket.socket", writer.get_extra_info("socket")).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    text = greeting(minor=minor) + ready(more=b"\x08Identity\x00\x00\x00\x02id") + message(b"a", b"", b"c" * 300)
    for byte in text + command(b"PING", b"\x00\x05ctx") + message(b"end"):
        writer.write(bytes((byte,)))
        await asyncio.sleep(0)
    await bench.until(2)
    assert bench.messages == [[b"a", b"", b"c" * 300], [b"end"]]
    answer = ANSWER + command(b"PONG", b"ctx")
    assert await asyncio.wait_for(reader.readexactly(len(answer)), 60) == answer
    writer.close()


BAD = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "no ZMTP greeting"),
    "zeros": (bytes(64), "no ZMTP greeting"),
    "one byte": (b"\x00", "no ZMTP greeting"),
    "half a signature": (b"\xff" + bytes(9) + b"\x03", "no ZMTP greeting"),
    "ZMTP 2": (b"\xff" + bytes(8) + b"\x7f\x01\x05", "ZMTP 1"),
    "PLAIN": (greeting(mechanism=b"PLAIN".ljust(20, b"\0")), "mechanism"),
    "PUSH": (greeting() + ready(b"PUSH"), "Socket-Type"),
    "no type": (greeting() + command(b"READY"), "Socket-Type"),
    "cut property": (greeting() + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x07DEALER"), "cut short"),
    "cut name": (greeting() + command(b"READY", b"\x0bSocket"), "cut short"),
    "other command": (greeting() + command(b"HELLO"), "not READY"),
    "empty command": (greeting() + frame(b"", 4), "not READY"),
    "message first": (greeting() + message(b"x"), "before READY"),
    "parts first": (greeting() + message(b"x", b"y"), "before READY"),
    "long handshake": (greeting() + struct.pack(">BQ", 6, 1 << 20), "1048576 bytes"),
    "ERROR": (HANDSHAKE + command(b"ERROR", b"\x01x"), "ERROR"),
    "PING too long": (HANDSHAKE + command(b"PING", bytes(19)), "PING"),
    "PING too short": (HANDSHAKE + command(b"PING", b"\0"), "PING"),
    "parts of a command": (HANDSHAKE + frame(b"\x04PING\0\0", 5), "flags 5"),
    "reserved flag": (HANDSHAKE + frame(b"", 8), "flags 8"),
    "no end": (HANDSHAKE + struct.pack(">BQ", 2, 2**64 - 1), "18446744073709551615 bytes"),
    "too large": (HANDSHAKE + struct.pack(">BQ", 2, zmtp.MESSAGE_BYTES + 1), f"{zmtp.MESSAGE_BYTES + 1} bytes"),
    "too large in parts": (HANDSHAKE + frame(b"x", 1) + struct.pack(">BQ", 2, zmtp.MESSAGE_BYTES), "bytes"),
    "too many frames": (HANDSHAKE + message(*[b""] * 9), "more than 8 frames"),
    "endless frames": (HANDSHAKE + frame(b"", 1) * 9, "more than 8 frames"),
    "long command": (HANDSHAKE + struct.pack(">BQ", 6, 1 << 20), "1048576 bytes"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_peer_that_keeps_to_no_protocol_is_refused_once(bench: Bench, case: str) -> None:
    text, problem = BAD[case]
    good = bench.socket()
    await good.send(b"before")
    await bench.until(1)
    reader, writer = await bench.raw()
    writer.write(text)
    # What follows is not taken for messages.
    with contextlib.suppress(ConnectionError):
        writer.write(message(b"evil") * 100)
        await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await good.send(b"after")
    await bench.until(2)
    assert bench.messages == [[b"before"], [b"after"]]
    assert len(bench.refused) == 1
    assert problem in bench.refused[0]
    assert len(bench.listener.connections) == 1


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.SUB, zmq.REQ, zmq.PAIR, zmq.ROUTER])
async def test_other_kinds_of_sockets_are_refused(bench: Bench, kind: int) -> None:
    peer = bench.socket(kind)
    async with asyncio.timeout(60):
        while not bench.refused:  # noqa: ASYNC110, nothing tells
            await asyncio.sleep(0.002)
    peer.close()
    assert set(bench.refused) == {"Socket-Type is not DEALER"}
    assert bench.messages == []


async def test_commands_for_other_sockets_are_ignored(bench: Bench) -> None:
    reader, writer = await bench.raw()
    writer.write(HANDSHAKE)
    for name in (b"SUBSCRIBE", b"CANCEL", b"PONG", b"JOIN", b"WHATEVER"):
        writer.write(command(name, b"topic"))
    # A command may come between the frames of a message.
    writer.write(frame(b"a", 1) + command(b"PING", bytes(18)) + frame(b"b"))
    await bench.until(1)
    assert bench.messages == [[b"a", b"b"]]
    answer = ANSWER + command(b"PONG", bytes(16))
    assert await asyncio.wait_for(reader.readexactly(len(answer)), 60) == answer
    writer.close()


async def test_heartbeats_are_answered(bench: Bench) -> None:
    peer = bench.socket(HEARTBEAT_IVL=100, HEARTBEAT_TIMEOUT=1500, HEARTBEAT_TTL=10_000)
    await peer.send(b"one")
    await bench.until(1)
    await asyncio.sleep(2.0)
    await peer.send(b"two")
    await bench.until(2)
    assert bench.froms[0] is bench.froms[1], "the peer took this side for dead and connected again"


async def test_a_half_open_connection_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmtp, "_HANDSHAKE_S", 0.5)
    silent, greeted, whole = [await bench.raw() for _ in range(3)]
    greeted[1].write(greeting())
    whole[1].write(HANDSHAKE)
    for reader, writer in (silent, greeted):
        assert await asyncio.wait_for(reader.read(), 60) == greeting()
        writer.close()
    assert bench.refused == ["no handshake"] * 2
    whole[1].write(message(b"x"))
    await bench.until(1)
    whole[1].close()


async def test_reconnect(bench: Bench) -> None:
    peer = bench.socket(RECONNECT_IVL=20)
    await peer.send(b"one")
    await bench.until(1)
    bench.listener.close()
    await asyncio.sleep(0.05)
    assert not bench.froms[0].send([b"gone"])
    assert bench.listener.start(bench.endpoint) == bench.endpoint
    async with asyncio.timeout(60):
        while len(bench.messages) < 2:
            await peer.send(b"two")
            await asyncio.sleep(0.01)
    assert bench.froms[1] is not bench.froms[0]
    assert bench.froms[1].send([b"back"])
    assert await asyncio.wait_for(peer.recv_multipart(), 60) == [b"back"]


async def test_a_peer_that_went_is_sent_nothing(bench: Bench) -> None:
    _, writer = await bench.raw()
    writer.write(HANDSHAKE + message(b"x"))
    await bench.until(1)
    assert bench.froms[0].send([b"y"])
    writer.transport.abort()
    async with asyncio.timeout(60):
        while bench.listener.connections:  # noqa: ASYNC110, nothing tells
            await asyncio.sleep(0.002)
    assert not bench.froms[0].send([b"y"])
    assert bench.refused == []


async def test_what_a_slow_reader_does_not_take_is_dropped(bench: Bench) -> None:
    reader, writer = await bench.raw()
    writer.write(HANDSHAKE + message(b"x"))
    await bench.until(1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    slow, large = bench.froms[0], bytes(1 << 20)
    sent = 0
    while slow.send([large]):
        sent += 1
        await asyncio.sleep(0)
        assert sent < 200, "nothing bounds what waits"
    other = bench.socket()
    await other.send(b"hello")
    await bench.until(2)
    assert bench.froms[1].send([b"quick"])
    assert await asyncio.wait_for(other.recv_multipart(), 60) == [b"quick"]
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    await asyncio.wait_for(reader.readexactly(len(ANSWER) + sent * len(message(large))), 60)
    assert slow.send([b"again"])
    assert await asyncio.wait_for(reader.readexactly(7), 60) == message(b"again")
    writer.close()


# -- endpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("tcp://*:*", ["127.0.0.1", "[::1]"]),
        ("tcp://0.0.0.0:0", ["127.0.0.1"]),
        ("tcp://[::1]:*", ["[::1]"]),
        ("tcp://localhost:*", ["localhost"]),
    ],
)
async def test_tcp_endpoints(endpoint: str, reached: list[str]) -> None:
    if "[" in endpoint and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    bench = Bench(endpoint)
    port = bench.endpoint.rsplit(":", 1)[1]
    for address in reached:
        if "[" in address and not socket.has_dualstack_ipv6():
            continue
        bench.endpoint = f"tcp://{address}:{port}"
        peer = bench.socket(IPV6=1)
        await peer.send(address.encode())
        await bench.until(len(bench.messages) + 1)
        peer.close()
    bench.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("abstract", [False, True])
async def test_local_endpoints(tmp_path: Path, *, abstract: bool) -> None:
    path = tmp_path / "hooks"
    endpoint = f"ipc://@{path}" if abstract else f"ipc://{path}"
    if not abstract:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        assert path.exists(), "what a killed daemon leaves behind"
    bench = Bench(endpoint)
    peer = bench.socket()
    await peer.send(b"x")
    await bench.until(1)
    assert bench.froms[0].address == ""
    with pytest.raises(OSError, match="hooks"):
        Bench(endpoint)
    bench.close()
    await asyncio.sleep(0)
    assert not path.exists()


@pytest.mark.parametrize(
    "endpoint", ["tcp://no.such.host.invalid:*", "tcp://127.0.0.1:70000", "ipc:///no/such/path", "x"]
)
async def test_endpoints_that_cannot_be_listened_to(endpoint: str) -> None:
    with pytest.raises(OSError, match=endpoint):
        Bench(endpoint)


async def test_closed_before_the_loop_turned() -> None:
    bench = Bench()
    bench.close()
    again = Listener(lambda *_: None, lambda *_: None)
    assert again.start(bench.endpoint) == bench.endpoint
    again.close()


# -- bytes cut anywhere -------------------------------------------------------------------------------------------------


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.paused = self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        assert not self.closing
        self.paused = False

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _name: str) -> None:
        return None


async def fed(pieces: Sequence[bytes]) -> tuple[list[list[bytes]], list[str], Wire, list[int]]:
    """What a connection makes of pieces read one after the other: messages, refusals, the transport, and how many messages
    each turn of the loop took."""
    messages: list[list[bytes]] = []
    refused: list[str] = []
    turns: list[int] = []
    listener = Listener(lambda _, m: messages.append([bytes(f) for f in m]), lambda _, p: refused.append(p))
    wire, connection = Wire(), Connection(listener)
    connection.connection_made(cast("asyncio.Transport", wire))
    for piece in pieces:
        while wire.paused:
            before = len(messages)
            await asyncio.sleep(0)
            turns.append(len(messages) - before)
        if wire.closing:
            break
        before = len(messages)
        connection.data_received(piece)
        turns.append(len(messages) - before)
    while wire.paused and not wire.closing:
        before = len(messages)
        await asyncio.sleep(0)
        turns.append(len(messages) - before)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return messages, refused, wire, turns


def cut(text: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


bodies = st.one_of(st.binary(max_size=20), st.integers(200, 9000).map(lambda n: bytes(i % 251 for i in range(n))))
exchanges = st.lists(
    st.one_of(st.lists(bodies, min_size=1, max_size=8), st.binary(min_size=2, max_size=18)), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(exchanges, st.lists(st.integers(0, 2**20), max_size=40))
def test_where_reads_end_changes_nothing(parts: list[list[bytes] | bytes], at: list[int]) -> None:
    """A list is a message, bytes are what a PING carries."""
    text = HANDSHAKE + b"".join(message(*p) if isinstance(p, list) else command(b"PING", p) for p in parts)
    messages, refused, wire, _ = asyncio.run(fed(cut(text, at)))
    assert messages == [p for p in parts if isinstance(p, list)]
    assert refused == []
    assert wire.written == ANSWER + b"".join(command(b"PONG", p[2:]) for p in parts if isinstance(p, bytes))


def test_every_cut() -> None:
    parts = [[b"head", b"x" * 300, b"tail"], [b""], [b"y" * 255, b"z" * 256]]
    text = HANDSHAKE + b"".join(message(*p) for p in parts)

    async def every() -> None:
        for i in range(len(text) + 1):
            assert (await fed([text[:i], text[i:]]))[0] == parts
        assert (await fed([bytes((b,)) for b in text]))[0] == parts

    asyncio.run(every())


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([b"", greeting(), HANDSHAKE]), st.binary(max_size=400), st.lists(st.integers(0, 2**20), max_size=6)
)
@example(HANDSHAKE, b"\x04\x00", [])
@example(HANDSHAKE, b"\x04\x01\xff", [])
@example(HANDSHAKE, b"\x06" + b"\x00" * 8, [])
def test_no_bytes_raise(before: bytes, garbage: bytes, at: list[int]) -> None:
    _, refused, wire, _ = asyncio.run(fed(cut(before + garbage, at)))
    assert len(refused) == wire.closing


def test_a_turn_of_the_loop_takes_a_share() -> None:
    tiny = [HANDSHAKE, message(b"x") * 1000]
    messages, refused, _, turns = asyncio.run(fed(tiny))
    assert (len(messages), refused) == (1000, [])
    assert max(turns) <= 64
    large = message(b"head", bytes(3 << 20))
    reads = [(large * 4)[i : i + (256 << 10)] for i in range(0, 4 * len(large), 256 << 10)]
    messages, _, _, turns = asyncio.run(fed([HANDSHAKE, *reads]))
    assert messages == [[b"head", bytes(3 << 20)]] * 4
    assert len(turns) == 1 + 2 * len(reads) - 1, "after every large read the loop has a turn"


def test_a_refusal_in_the_middle_of_a_read_ends_it() -> None:
    text = message(b"a") + frame(b"", 8) + message(b"b") * 100
    messages, refused, wire, _ = asyncio.run(fed([HANDSHAKE, text, text]))
    assert (messages, len(refused), wire.closing) == ([[b"a"]], 1, True)
    # The same where the frame had begun in the read before.
    ping = command(b"PING", bytes(20))
    messages, refused, _, _ = asyncio.run(fed([HANDSHAKE, ping[:5], ping[5:] + message(b"b")]))
    assert (messages, len(refused)) == ([], 1)
