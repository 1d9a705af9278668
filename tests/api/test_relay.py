"""The relay between two real transports."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

import orjson
import pytest

if TYPE_CHECKING:
    from conftest import Exchange, Script, Stack

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAMED = b"9\r\ndata: a\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


# -- answers ------------------------------------------------------------------------------------------------------------


async def test_bytes_pass_as_they_are(stack: Stack) -> None:
    client = await stack.connect()
    client.ask()
    status, head, body = await client.answer()
    assert status == 200
    assert body == STREAMED
    assert b"content-type: text/event-stream" in head
    assert b"x-eldrd-decode: d0" in head
    client.close()


async def test_keep_alive_after_a_relayed_answer(stack: Stack) -> None:
    client = await stack.connect()
    for _ in range(3):
        client.ask()
        assert (await client.answer())[2] == STREAMED
    client.send(b"{")
    assert (await client.answer())[0] == 400
    client.ask()
    assert (await client.answer())[2] == STREAMED
    client.close()


async def test_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    async def echoes(exchange: Exchange) -> None:
        await exchange.json({"prompt": orjson.loads(exchange.body)["prompt"]})

    stack.D.script = echoes
    client = await stack.connect()
    for i in range(5):
        client.ask(prompt=f"p{i}", stream=False)
    for i in range(5):
        status, _, body = await client.answer()
        assert (status, orjson.loads(body)) == (200, {"prompt": f"p{i}"})
    client.close()


async def test_connection_close_is_honoured(stack: Stack) -> None:
    client = await stack.connect()
    client.ask(b"connection: close")
    head = await client.head()
    assert b"connection: close" in head.lower()
    assert await client.rest() == STREAMED


async def test_answer_that_ends_with_the_connection(stack: Stack) -> None:
    """The client can see its end only by our closing, too."""

    async def closes(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: a\n\n")
        exchange.writer.close()

    stack.D.script = closes
    client = await stack.connect()
    client.ask()
    head = await client.head()
    assert b"connection: close" in head.lower()
    assert await client.rest() == b"data: a\n\n"


async def test_error_of_the_worker_passes(stack: Stack) -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.json({"error": {"message": "no"}}, 422)

    stack.D.script = refuses
    client = await stack.connect()
    client.ask()
    status, _, body = await client.answer()
    assert (status, orjson.loads(body)) == (422, {"error": {"message": "no"}})
    client.ask()
    assert (await client.answer())[0] == 422
    client.close()


async def test_fields_of_the_worker(stack: Stack) -> None:
    """Hop-by-hop fields stay on their hop, the request id is the client's."""

    async def talkative(exchange: Exchange) -> None:
        await exchange.write(
            b"HTTP/1.1 200 OK\r\nx-a: 1\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nx-request-id: d\r\n"
            b"keep-alive: timeout=5\r\ncontent-length: 2\r\n\r\nok"
        )

    stack.D.script = talkative
    client = await stack.connect()
    client.ask(b"x-request-id: mine")
    _, head, body = await client.answer()
    lower = head.lower()
    assert body == b"ok"
    assert b"x-a: 1" in lower
    assert b"x-hop" not in lower
    assert b"timeout=5" not in lower
    assert lower.count(b"x-request-id") == 1
    assert b"x-request-id: mine" in lower
    assert lower.count(b"content-length") == 1
    client.close()


@pytest.mark.parametrize("cut", [1, 3, 5, 8, 12, 19, 30])
async def test_error_event_in_pieces_is_an_error(stack: Stack, cut: int) -> None:
    event = b'data: {"error": {"message": "no", "code": 400}}\n\n'
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)

    async def refuses(exchange: Exchange) -> None:
        await exchange.write(CHUNKED, body[:cut], body[cut:], pause_s=0.02)

    stack.D.script = refuses
    client = await stack.connect()
    client.ask()
    status, _, got = await client.answer()
    assert (status, orjson.loads(got)["error"]["message"]) == (400, "no")
    client.close()


# -- losses -------------------------------------------------------------------------------------------------------------


def _dies_after(piece: bytes) -> Script:
    async def dies(exchange: Exchange) -> None:
        await exchange.write(CHUNKED, piece, pause_s=0.02)
        exchange.writer.transport.abort()

    return dies


@pytest.mark.parametrize("piece", [b"9\r\ndat", b"9"])
async def test_worker_lost_before_its_first_event(stack: Stack, piece: bytes) -> None:
    """Nothing has been written yet: the client gets a status."""
    stack.D.script = _dies_after(piece)
    client = await stack.connect()
    client.ask()
    status, _, body = await client.answer()
    assert (status, orjson.loads(body)["error"]["code"]) == (502, 502)
    client.close()


@pytest.mark.parametrize("piece", [b"9\r\ndata: a\n\n\r\n", b"9\r\ndata: a", b'4d\r\ndata: {"id"'])
async def test_worker_lost_in_a_stream(stack: Stack, piece: bytes) -> None:
    stack.D.script = _dies_after(piece)
    client = await stack.connect()
    client.ask()
    await client.head()
    try:
        rest = await client.rest()
    except ConnectionError:
        rest = b""
    assert b"0\r\n\r\n" not in rest
    assert b"[DONE]" not in rest
    if piece.endswith(b"\r\n"):
        chunk = rest.removeprefix(piece)
        size, _, event = chunk.partition(b"\r\n")
        assert int(size, 16) == len(event) - 2
        assert orjson.loads(event.removeprefix(b"data: "))["error"]["code"] == 502
    assert stack.outcomes == ["consumed"]


async def test_worker_lost_in_an_answer_that_ends_with_the_connection(stack: Stack) -> None:
    """A plain end would say that all of it was there."""

    async def dies(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: a\n\n", pause_s=0.02)
        exchange.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        exchange.writer.transport.abort()

    stack.D.script = dies
    client = await stack.connect()
    client.ask()
    await client.head()
    with pytest.raises(ConnectionResetError):
        await client.rest()


async def test_client_gone_in_a_stream_ends_the_workers(stack: Stack) -> None:
    """And the next request gets nothing of that stream."""

    async def endless(exchange: Exchange) -> None:
        await exchange.write(CHUNKED)
        await exchange.write(*[b"9\r\ndata: a\n\n\r\n"] * 500, pause_s=0.002)

    stack.D.script = endless
    client = await stack.connect()
    client.ask()
    await client.head()
    await client.reader.readuntil(b"data: a")
    client.close()
    await stack.until(lambda: stack.D.gone == 1)
    await stack.settled()

    async def fresh(exchange: Exchange) -> None:
        await exchange.write(CHUNKED + STREAMED)

    stack.D.script = fresh
    client = await stack.connect()
    client.ask()
    assert (await client.answer())[2] == STREAMED
    client.close()


async def test_slow_reader_pauses_the_worker(stack: Stack) -> None:
    """What a client does not read stays at the worker: memory is bounded, and all of it comes in the end."""
    total = 96
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.write(CHUNKED)
        for _ in range(total):
            await exchange.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            sent += 1
        await exchange.write(b"0\r\n\r\n")

    stack.D.script = flood
    client = await stack.connect()
    client.writer.transport.pause_reading()
    client.ask()
    before = -1
    while sent != before or not sent:
        before = sent
        await asyncio.sleep(0.5)
    assert sent < total / 2
    (handler,) = stack.server.connections
    assert handler.transport.get_write_buffer_size() < 2 << 20
    client.writer.transport.resume_reading()
    await client.head()
    got = 0
    while got < total * ((1 << 20) + 10) + 5:
        data = await asyncio.wait_for(client.reader.read(1 << 20), 30)
        assert data
        got += len(data)
    client.ask(stream=False)
    stack.D.script = _ok
    assert (await client.answer())[0] == 200
    client.close()


async def test_slow_reader_that_leaves(stack: Stack) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.write(CHUNKED)
        while True:
            await exchange.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")

    stack.D.script = flood
    client = await stack.connect()
    client.writer.transport.pause_reading()
    client.ask()
    await asyncio.sleep(0.2)
    client.close()
    await stack.until(lambda: stack.D.gone == 1)


async def _ok(exchange: Exchange) -> None:
    await exchange.json({})


async def test_stalled_client_is_ended(stack: Stack) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.write(CHUNKED)
        while True:
            await exchange.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")

    stack.watch.idle_s = 0.1
    stack.D.script = flood
    client = await stack.connect()
    client.writer.transport.pause_reading()
    client.ask()
    await stack.until(lambda: stack.D.gone == 1)
    await stack.settled()
    assert stack.workers[1].usable
    client.close()


async def test_stalled_client_of_small_events_is_ended_too(stack: Stack) -> None:
    """Its socket is closed for good, although what was written to it can never leave."""

    async def flood(exchange: Exchange) -> None:
        await exchange.write(CHUNKED)
        while True:
            await exchange.write(b"9\r\ndata: a\n\n\r\n" * 1000)

    stack.watch.idle_s = 0.1
    stack.D.script = flood
    client = await stack.connect()
    client.writer.transport.pause_reading()
    client.ask()
    await stack.until(lambda: stack.D.gone == 1)
    await stack.until(lambda: not stack.server.connections)
    await stack.settled()
    client.close()
