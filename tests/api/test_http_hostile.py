"""Connections: bytes meant to confuse two servers about where a request ends, or to cost memory; clients that slip away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from eldrd.api import http

if TYPE_CHECKING:
    from conftest import Client, Exchange, Stack

BODY = b'{"model":"m","prompt":"abc","stream":true}'
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    lines = (b"POST /v1/completions HTTP/" + version, b"Host: x", *fields, b"", body)
    return b"\r\n".join(lines)


async def statuses(client: Client) -> list[int]:
    """Of all answers until the connection ends."""
    found = []
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            found.append((await client.answer())[0])
    client.close()
    return found


# -- where a request ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
        post(b"Transfer-Encoding: identity, chunked", body=CHUNKS),
        post(b"Transfer-Encoding: ,chunked", body=CHUNKS),
        post(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked", body=CHUNKS),
        post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=CHUNKS),
        post(b"Transfer-Encoding: chunked", body=CHUNKS, version=b"1.0"),
        post(b"Transfer-Encoding: chunked", b"Connection: keep-alive", body=CHUNKS, version=b"1.0"),
        post(b"Transfer-Encoding: chunked", LENGTH, body=CHUNKS),
        post(b"Connection: Upgrade", b"Upgrade: h2c", b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
        post(b"Connection: Upgrade", b"Upgrade: h2c", b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"),
        post(b"Connection: Upgrade", b"Upgrade: h2c", b"Transfer-Encoding: chunked", body=b"zz\r\n"),
    ],
)  # fmt: skip
async def test_only_one_way_to_read_a_body(stack: Stack, data: bytes) -> None:
    """What nginx answers 501 or 400, since servers do not agree on it (RFC 9112, 6.1)."""
    client = await stack.connect()
    client.writer.write(data + GET)
    assert await statuses(client) == [400]
    assert stack.P.exchanges == []


@pytest.mark.parametrize("fields", [(b"Connection: Upgrade, close",), (b"Connection: Upgrade", b"Connection: close")])
async def test_upgrade_and_close(stack: Stack, fields: tuple[bytes, ...]) -> None:
    """The request is answered, and what follows it is not."""
    client = await stack.connect()
    client.writer.write(post(*fields, b"Upgrade: h2c", LENGTH, body=BODY) + GET)
    assert await statuses(client) == [200]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_many_pipelined_upgrades(stack: Stack, version: bytes) -> None:
    client = await stack.connect()
    upgrade = b"GET /health HTTP/%b\r\nConnection: Upgrade, keep-alive\r\nUpgrade: h2c\r\n\r\n" % version
    client.writer.write(upgrade * 2000 + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert await statuses(client) == [200] * 2001


@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (b"POST /nowhere HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}", 404),
        (b"POST /nowhere HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000, 404),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000, 413),
        (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n", 405),
        (b"GET /health HTTP/1.1\r\nA: %b\r\n\r\n" % (b"x" * http.MAX_HEAD), 431),
    ],
)
@pytest.mark.parametrize("sections", [{"server": {"max_body_bytes": 1024}}])
async def test_nothing_is_served_behind_a_refusal(stack: Stack, refused: bytes, status: int) -> None:
    """Its answer has said that the connection closes."""
    client = await stack.connect()
    client.writer.write(refused + post(LENGTH, body=BODY) + GET)
    assert await statuses(client) == [status]
    assert stack.P.exchanges == []


async def test_continue_is_for_http_1_1(stack: Stack) -> None:
    """RFC 9110, 10.1.1: an expectation in HTTP/1.0 is ignored."""
    client = await stack.connect()
    client.writer.write(post(b"Expect: 100-continue", LENGTH, b"Connection: keep-alive", version=b"1.0"))
    await asyncio.sleep(0.05)
    client.writer.write(BODY)
    assert (await client.head()).startswith(b"HTTP/1.1 200 ")
    client.close()


# -- many at once -------------------------------------------------------------------------------------------------------


async def test_many_small_requests_are_no_long_head(stack: Stack) -> None:
    """Reads that begin in one head and end in another."""
    client = await stack.connect()
    client.writer.write(GET * 20_000)
    client.writer.write(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert await statuses(client) == [200] * 20_001


async def test_a_flood_of_requests_lets_others_in_between(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    handle = stack.app.handle

    def noted(exchange: Any) -> Any:
        served.append(exchange.path)
        return handle(exchange)

    monkeypatch.setattr(stack.app, "handle", noted)
    flood, other = await stack.connect(), await stack.connect()
    flood.writer.write(b"GET /ready HTTP/1.1\r\n\r\n" * 2000)
    other.writer.write(GET)
    assert (await other.answer())[0] == 200
    assert served.index("/health") < 1000
    flood.writer.write(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert await statuses(flood) == [200] * 2001


# -- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [b"X: a\r\n" * 1000, b"x" * 6000], ids=["fields", "one"])
@pytest.mark.parametrize("start", [b"0\r\nA: b", b"%x;" % len(BODY)], ids=["trailer", "extension"])
async def test_what_surrounds_a_body_is_bounded(stack: Stack, start: bytes, piece: bytes) -> None:
    client = await stack.connect()
    client.writer.write(post(b"Transfer-Encoding: chunked", body=b"2\r\n{}\r\n" + start))
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            client.writer.write(piece)
            await client.writer.drain()
            await asyncio.sleep(0)
    assert await statuses(client) == [400]


async def test_body_in_chunks_of_a_few_bytes(stack: Stack) -> None:
    """Takes what its bytes take."""
    client = await stack.connect()
    start, size = BODY[:-1] + b',"user":"', 300_000
    client.writer.write(post(b"Transfer-Encoding: chunked", body=b"%x\r\n%b\r\n" % (len(start), start)))
    await asyncio.sleep(0.05)
    tracemalloc.start()
    for _ in range(size // 2000):
        client.writer.write(b"2\r\nxy\r\n" * 1000)
        await client.writer.drain()
        await asyncio.sleep(0)
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, http.__file__)])
    tracemalloc.stop()
    client.writer.write(b'2\r\n"}\r\n0\r\n\r\n')
    assert (await client.answer())[0] == 200
    assert stack.D.exchanges[0].body.startswith(start + b"xy" * (size // 2))
    assert sum(s.size for s in ours.statistics("filename")) < 2 * size
    client.close()


# -- clients that leave -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end", "half", "reset"])
@pytest.mark.parametrize("sections", [{"server": {"keepalive_s": 1}}])
async def test_pipelining_client_that_leaves(stack: Stack, how: str) -> None:
    """Reading has stopped for the requests that wait; that the client has gone is seen all the same."""

    async def never(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    stack.P.script = never
    client = await stack.connect()
    client.writer.write(post(LENGTH, body=BODY) * 5)
    await stack.until(lambda: len(stack.P.exchanges) == 1)
    if how == "half":
        client.writer.write_eof()
    elif how == "end":
        client.writer.close()
    else:
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
    await stack.until(lambda: not stack.server.connections)
    await stack.settled()
    assert len(stack.P.exchanges) == 1
    client.close()


async def test_refused_client_sees_the_end_at_once(stack: Stack) -> None:
    """Though it gets time to read the answer, and to send what it had begun."""
    client = await stack.connect()
    client.writer.write(b"what\r\n\r\n")
    assert (await client.answer())[0] == 400
    assert await asyncio.wait_for(client.reader.read(), http.LINGER_S - 1) == b""
    client.writer.write(b"x" * 1_000_000)
    await client.writer.drain()
    client.close()
