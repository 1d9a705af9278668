"""Scenarios S1-S5: a stream's bytes are the decode worker's, as they come, and a stream that breaks never looks whole."""

from __future__ import annotations

import contextlib
import statistics
from itertools import pairwise
from typing import TYPE_CHECKING

import aiohttp
import orjson
import pytest
from stage import CHAT, COMPLETIONS, ask, chat

if TYPE_CHECKING:
    from stage import Reply, Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")

CJK = "汉字かな交じり文と한국어 🀄"


def sent(stage: Stage, reply: Reply) -> bytes:
    """What the decode worker of an answer sent for it."""
    worker = next(d for d in stage.decode if d.name == reply.headers["x-eldrd-decode"])
    first = reply.events[0] if reply.body.startswith(b"data: ") else reply.body
    journal = worker.journal[orjson.loads(first)["id"].partition("-")[2]]
    assert journal.whole
    return bytes(journal.body)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("text", ["data: [DONE]\n\n", '{"error"', "\r\n\r\n0\r\n\r\n", "data: "])
async def test_s1_text_that_looks_like_an_end(stage: Stage, path: str, text: str) -> None:
    stage.fault(stage.decode, first_text=text)
    body = ask(stream=True) if path == COMPLETIONS else chat(stream=True, max_tokens=12)
    reply = await stage.post(body, path)
    assert reply.whole
    assert reply.body == sent(stage, reply)
    assert reply.text.startswith(text)
    assert len(reply.text.removeprefix(text).split()) == 11


@pytest.mark.parametrize("faults", [{"chunk": 1}, {"split": 1}, {"chunk": 3, "split": 2}, {"chunk": 1, "split": 7}])
async def test_s2_characters_cut_at_any_byte(stage: Stage, faults: dict[str, int]) -> None:
    stage.fault(stage.decode, first_text=CJK, **faults)
    reply = await stage.post(ask(stream=True, max_tokens=3))
    assert reply.whole
    assert reply.body == sent(stage, reply)
    assert reply.text.startswith(CJK)


async def test_s2_whole_answer_cut_at_any_byte(stage: Stage) -> None:
    stage.fault([*stage.prefill, *stage.decode], first_text=CJK, split=1)
    reply = await stage.post(ask())
    assert reply.whole
    assert reply.body == sent(stage, reply)


@pytest.mark.parametrize("stream", [False, True])
async def test_s3_one_event_of_a_megabyte(stage: Stage, stream: bool) -> None:
    stage.fault(stage.decode, first_text="x" * 2**20)
    reply = await stage.post(ask(stream=stream))
    assert reply.whole
    assert reply.body == sent(stage, reply)
    assert len(reply.body) > 2**20


@pytest.mark.parametrize("cut", ["close", "reset"])
async def test_s4_whole_answer_shorter_than_declared(stage: Stage, cut: str) -> None:
    stage.fault(stage.decode, cut_at=400, cut=cut)
    reply = await stage.post(ask(max_tokens=200))
    assert reply.cut
    assert len(reply.body) < 400


@pytest.mark.parametrize("cut", ["close", "reset"])
@pytest.mark.parametrize("at", [700, 701, 750, 763, 900, 1111])
async def test_s4_stream_without_its_end(stage: Stage, cut: str, at: int) -> None:
    stage.fault(stage.decode, cut_at=at, cut=cut)
    reply = await stage.post(ask(stream=True, max_tokens=200))
    assert reply.cut
    assert b"[DONE]" not in reply.body
    if b'data: {"error"' in reply.body:
        assert orjson.loads(reply.events[-1])["error"]["code"] == 502


@pytest.mark.parametrize("at", range(600, 640))
async def test_s4_chunks_that_are_no_events(stage: Stage, at: int) -> None:
    """Chunks of 7 bytes: where one ends is mostly the middle of an event, and no place for another."""
    stage.fault(stage.decode, chunk=7, cut_at=at)
    reply = await stage.post(ask(stream=True, max_tokens=50))
    assert reply.cut
    if b'data: {"error"' in reply.body:
        for event in reply.events:
            orjson.loads(event)


async def test_s4_compressed_stream_without_its_end(stage: Stage) -> None:
    """A plain error event would be no part of a compressed stream."""
    stage.fault(stage.decode, gzip=True, die_after_chunks=3)
    got = b""
    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.post(stage.eldrd.url + COMPLETIONS, json=ask(stream=True, max_tokens=200)) as r,
    ):
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async for part in r.content.iter_any():
                got += part
            pytest.fail("the stream looked whole")
    assert got
    assert b"error" not in got


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 1, 20, 60])
async def test_s4_cut_inside_the_head(stage: Stage, stream: bool, at: int) -> None:
    """Bytes of an answer were there, so nobody else is asked: 502, not a broken 200."""
    stage.fault(stage.decode, cut_at=at)
    reply = await stage.post(ask(stream=stream))
    assert reply.status == 502
    assert reply.error["type"] == "BadGatewayError"


async def test_s5_each_chunk_as_it_comes(stage: Stage) -> None:
    stage.fault(stage.decode, pause_s=0.08)
    reply = await stage.post(ask(stream=True, max_tokens=20))
    direct = await stage.post(ask(stream=True, max_tokens=20), url=stage.decode[0].url)
    assert reply.whole
    assert reply.headers["Content-Type"] == direct.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    # 20 events, 80 ms apart: none is held back to be sent with the next, though a busy machine may join a few.
    gaps = [b - a for a, b in pairwise(reply.arrivals)]
    assert len(reply.arrivals) >= 15
    assert statistics.median(gaps) > 0.04
