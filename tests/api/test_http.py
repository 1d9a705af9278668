"""Connections: what clients send that is no plain request, and how connections end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from eldrd.api import http

if TYPE_CHECKING:
    from conftest import Exchange, Stack

BODY = b'{"model":"m","prompt":"abc","stream":true}'
STREAMED = b"9\r\ndata: a\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def post(*fields: bytes, body: bytes = BODY) -> bytes:
    lines = (b"POST /v1/completions HTTP/1.1", b"Host: x", *fields, b"Content-Length: %d" % len(body), b"", body)
    return b"\r\n".join(lines)


# -- upgrades -----------------------------------------------------------------------------------------------------------

UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest.mark.parametrize("cut", [None, 40, 90, 150, -43, -20, -1])
async def test_upgrade_to_http_2_is_ignored(stack: Stack, cut: int | None) -> None:
    """Java's HttpClient offers it with every request."""
    client = await stack.connect()
    data = post(b"X-Request-Id: mine", *UPGRADE)
    for _ in range(2):
        for part in (data[:cut], data[cut:]) if cut is not None else (data,):
            client.writer.write(part)
            await asyncio.sleep(0.01)
        status, head, body = await client.answer()
        assert (status, body) == (200, STREAMED)
        assert b"x-request-id: mine" in head
    assert stack.D.exchanges[0].body.startswith(BODY[:-1])
    client.close()


async def test_upgrade_then_pipelined(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(post(*UPGRADE) + post())
    for _ in range(2):
        assert (await client.answer())[::2] == (200, STREAMED)
    client.close()


async def test_connect_is_refused(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nbytes of a tunnel")
    assert (await client.answer())[0] == 400
    client.close()


# -- heads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/2.0\r\n\r\n", b"GET /health\r\n\r\n", b"\x16\x03\x01\x02\x00",
        b"GET /health HTTP/1.1\r\nA : b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nA: b\r\n c\r\n\r\n", b"GET /health HTTP/1.1\nA: b\n\n",
        post(b"Content-Length: 3"), post(b"Transfer-Encoding: chunked"),
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
async def test_what_is_no_http_ends_the_connection(stack: Stack, data: bytes) -> None:
    client = await stack.connect()
    client.writer.write(data)
    status, head, body = await client.answer()
    assert status == 400
    assert b"connection: close" in head
    assert orjson.loads(body)["error"]["type"] == "BadRequestError"
    assert stack.metrics.requests.labels("", 400, "malformed").value == 1
    client.close()


@pytest.mark.parametrize("lines", [http.MAX_HEAD // 1000 + 2, http.MAX_HEAD // 1000 - 2])
@pytest.mark.parametrize("complete", [False, True])
async def test_long_head(stack: Stack, lines: int, complete: bool) -> None:
    client = await stack.connect()
    head = b"GET /health HTTP/1.1\r\n" + (b"a: %b\r\n" % (b"x" * 1000)) * lines
    client.writer.write(head + b"\r\n" if complete else head)
    too_long = lines * 1000 > http.MAX_HEAD
    if not too_long and not complete:
        client.writer.write(b"\r\n")
    assert (await client.answer())[0] == (431 if too_long else 200)
    client.close()


async def test_one_header_without_end(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(b"GET /health HTTP/1.1\r\na: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(400):
            client.writer.write(b"x" * 1000)
            await client.writer.drain()
    assert (await client.answer())[0] == 431
    client.close()


async def test_head_behind_a_large_body(stack: Stack) -> None:
    """What is read with it is not the head's."""
    client = await stack.connect()
    large = BODY[:-1] + b',"user":"%b"}' % (b"x" * 2 * http.MAX_HEAD)
    client.writer.write(post(body=large) + b"GET /health HTTP/1.1\r\nHo")
    assert (await client.answer())[0] == 200
    client.writer.write(b"st: a\r\n\r\n")
    assert (await client.answer())[0] == 200
    client.close()


async def test_trailers_are_no_headers(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(
        b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"%x\r\n%b\r\n0\r\nX-Request-Id: other\r\nX-Eldrd-Label: l\r\n\r\n" % (len(BODY), BODY)
    )
    status, head, _ = await client.answer()
    assert status == 200
    assert head.lower().count(b"x-request-id") == 1
    assert b"x-request-id: mine" in head
    client.close()


@pytest.mark.parametrize("target", [b"/health", b"/health?a=/x", b"http://some.host:1/health", b"http://h/health?q"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_targets(stack: Stack, target: bytes, method: bytes) -> None:
    client = await stack.connect()
    client.writer.write(b"%b %b HTTP/1.1\r\nHost: a\r\n\r\n" % (method, target))
    head = await client.head()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.count(b"date: ") == 1
    client.close()


async def test_head_gets_no_body(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    head = await client.head()
    assert b"content-length: 0" not in head
    assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\n")
    client.close()


# -- bodies -------------------------------------------------------------------------------------------------------------

small = pytest.mark.parametrize("sections", [{"server": {"max_body_bytes": 1024}}])


@small
async def test_declared_too_large(stack: Stack) -> None:
    """Answered before the body; a client that sends all of it first still gets the answer."""
    client = await stack.connect()
    client.writer.write(post(body=b"x" * 3_000_000)[:200])
    status, head, body = await client.answer()
    assert status == 413
    assert b"connection: close" in head
    assert "1024" in orjson.loads(body)["error"]["message"]
    client.writer.write(b"x" * 3_000_000)
    await client.writer.drain()
    client.close()


@small
async def test_chunked_too_large(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(8):
        client.writer.write(b"ff\r\n" + b"x" * 255 + b"\r\n")
    assert (await client.answer())[0] == 413
    client.close()


@small
async def test_expected_too_large(stack: Stack) -> None:
    """No 100 Continue for what is refused anyway."""
    client = await stack.connect()
    client.writer.write(post(b"Expect: 100-continue", body=b"x" * 2000)[:150])
    assert (await client.answer())[0] == 413
    client.close()


@pytest.mark.parametrize("path", [b"/nowhere", b"/health"])
async def test_body_of_a_refused_request_is_not_kept(stack: Stack, path: bytes) -> None:
    client = await stack.connect()
    client.writer.write(b"POST %b HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n" % path)
    for _ in range(20):
        client.writer.write(b"x" * 100_000)
        await client.writer.drain()
    assert (await client.answer())[0] in (404, 405)
    client.writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    assert (await client.answer())[0] == 200
    client.close()


# -- one after another --------------------------------------------------------------------------------------------------


async def test_many_pipelined_of_all_kinds(stack: Stack) -> None:
    client = await stack.connect()
    kinds = [post(), b"GET /health HTTP/1.1\r\n\r\n", b"GET /nowhere HTTP/1.1\r\n\r\n"]
    client.writer.write(b"".join(kinds * 30))
    got = [(await client.answer())[0] for _ in range(90)]
    assert got == [200, 200, 404] * 30
    client.close()


async def test_good_ones_before_a_bad_one_are_answered(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(post() + b"GET /health HTTP/1.1\r\n\r\n" + b"what is this\r\n\r\n")
    assert [(await client.answer())[0] for _ in range(3)] == [200, 200, 400]
    client.close()


async def test_nothing_follows_the_last_answer(stack: Stack) -> None:
    client = await stack.connect()
    client.writer.write(post(b"Connection: close") + post())
    head = await client.head()
    assert b"connection: close" in head
    assert await client.rest() == STREAMED
    assert len(stack.D.exchanges) == 1


async def test_big_answers_wait_for_their_reader(stack: Stack) -> None:
    """What a pipelining client does not read is not made."""

    async def big(exchange: Exchange) -> None:
        await exchange.json({"a": "x" * (4 << 20)}, 400)

    stack.D.script = big
    client = await stack.connect()
    client.writer.transport.pause_reading()
    client.writer.write(post() * 5)
    await asyncio.sleep(0.5)
    made = len(stack.D.exchanges)
    assert made < 5
    client.writer.transport.resume_reading()
    for _ in range(5):
        assert (await client.answer())[0] == 400
    client.close()


# -- ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [{"server": {"keepalive_s": 1}}])
async def test_idle_connections_are_closed(stack: Stack) -> None:
    stack.server._keepalive_s = 0.1
    client = await stack.connect()
    client.ask()
    await client.answer()
    assert await client.rest() == b""


@pytest.mark.parametrize("data", [b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"])
@pytest.mark.parametrize("sections", [{"server": {"keepalive_s": 1}}])
async def test_requests_that_never_end_are_closed(stack: Stack, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(http, "STALLED_S", 0.1)
    client = await stack.connect()
    client.writer.write(data)
    with contextlib.suppress(ConnectionError):
        assert await client.rest() == b""
    await stack.until(lambda: not stack.server.connections)


async def test_refused_client_that_stays_is_closed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_S", 0.1)
    client = await stack.connect()
    client.writer.write(b"what\r\n\r\n")
    await client.answer()
    with contextlib.suppress(ConnectionError):
        assert await client.rest() == b""


async def test_shutdown_lets_answers_end(stack: Stack) -> None:
    gate = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await gate.wait()
        await exchange.json({})

    stack.D.script = waits
    idle, busy = await stack.connect(), await stack.connect()
    busy.ask(stream=False)
    await stack.until(lambda: len(stack.D.exchanges) == 1)
    stack.server.pre_shutdown()
    assert await idle.rest() == b""
    gate.set()
    status, head, body = await busy.answer()
    assert (status, body) == (200, b"{}")
    assert b"connection: close" in head
    assert await busy.rest() == b""


async def test_shutdown_ends_what_goes_on(stack: Stack) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await asyncio.sleep(60)

    stack.D.script = endless
    client = await stack.connect()
    client.ask()
    await client.head()
    await stack.server.shutdown(0.5)
    assert stack.server.connections == set()
    await stack.settled()
    with contextlib.suppress(ConnectionError):
        assert b"0\r\n\r\n" not in await client.rest()


async def test_an_error_of_ours_is_not_the_clients(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """httptools wraps what callbacks raise as if the bytes were bad."""

    def broken(_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stack.app, "begin", broken)
    client = await stack.connect()
    client.writer.write(post())
    with contextlib.suppress(ConnectionError):
        assert await client.rest() == b""
    assert [type(e["exception"]) for e in stack.errors] == [ZeroDivisionError]
    stack.errors.clear()
    assert stack.metrics.requests.labels("", 400, "malformed").value == 0
