"""Answers to clients of HTTP/1.0, which knows no chunks: nginx, unless it is told otherwise, and `ab`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson
import pytest

if TYPE_CHECKING:
    from conftest import Exchange, Stack

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_stream_without_chunks(stack: Stack) -> None:
    client = await stack.connect()
    client.ask(version=b"1.0")
    head = (await client.head()).lower()
    assert b"chunked" not in head
    assert await client.rest() == b"data: a\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("option", [b"close", b"keep-alive"])
async def test_events_as_they_come(stack: Stack, n: int, option: bytes) -> None:
    """nginx asks in HTTP/1.0 unless it is told otherwise; the end of the connection is the end of the stream."""
    gate = asyncio.Event()
    event = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(event), event)

    async def waits(exchange: Exchange) -> None:
        await exchange.write(CHUNKED, chunk[:1], chunk[1:20], chunk[20:] + chunk[:3], pause_s=0.01)
        await gate.wait()
        await exchange.write(chunk[3:], b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    stack.D.script = waits
    client = await stack.connect()
    client.ask(b"connection: " + option, version=b"1.0", n=n)
    head = (await client.head()).lower()
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    assert b"x-accel-buffering: no" in head
    first = await asyncio.wait_for(client.reader.readuntil(b"\n\n"), 30)
    gate.set()
    got = first + await client.rest()
    assert got.endswith(b"\n\ndata: [DONE]\n\n")
    assert got.count(b"data: ") == 2 * n + 1
    if n == 1:
        assert got == event * 2 + b"data: [DONE]\n\n"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
async def test_worker_lost_in_a_stream(stack: Stack, n: int, whole: bool) -> None:
    """One error event and no [DONE]; inside an event the connection is reset."""
    event = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(event), event)

    async def dies(exchange: Exchange) -> None:
        await exchange.write(CHUNKED + chunk + (b"" if whole else chunk[:-9]), pause_s=0.02)
        exchange.writer.transport.abort()

    stack.D.script = dies
    client = await stack.connect()
    client.ask(version=b"1.0", n=n)
    await client.head()
    if whole or n > 1:
        events = (await client.rest()).split(b"\n\n")
        assert orjson.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == 502
        assert b"[DONE]" not in b"".join(events)
    else:
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_whole_answer_in_chunks(stack: Stack) -> None:
    """Its length is told, so that the connection can be kept and a cut be seen."""

    async def chunked(exchange: Exchange) -> None:
        await exchange.write(b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\n{"a":1}\r\n0\r\n\r\n')

    stack.D.script = chunked
    client = await stack.connect()
    for _ in range(2):
        client.ask(b"connection: keep-alive", version=b"1.0", stream=False)
        assert (await client.answer())[2] == b'{"a":1}'
    client.close()


async def test_several_choices(stack: Stack) -> None:
    async def one(exchange: Exchange) -> None:
        event = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
        await exchange.write(CHUNKED + b"%x\r\n%b\r\n" % (len(event), event) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    stack.D.script = one
    client = await stack.connect()
    client.ask(version=b"1.0", n=2)
    assert b"chunked" not in (await client.head()).lower()
    events = (await client.rest()).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    choices = [orjson.loads(e.removeprefix(b"data: "))["choices"][0] for e in events[:-2]]
    assert sorted(c["index"] for c in choices) == [0, 1]


async def test_keep_alive(stack: Stack) -> None:
    async def plain(exchange: Exchange) -> None:
        await exchange.json({"a": 1})

    stack.D.script = plain
    client = await stack.connect()
    for _ in range(2):
        client.ask(b"connection: keep-alive", version=b"1.0", stream=False)
        _, head, body = await client.answer()
        assert b"connection: keep-alive" in head.lower()
        assert body == b'{"a":1}'
    client.close()
