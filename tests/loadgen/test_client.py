"""The open-loop client measures what a server with known timing does, and names every way a request can fail."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadgen import client
from loadgen.workloads import Request

TOKEN = b'data: {"choices":[{"index":0,"text":" a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"
GAP = 0.04


def trace(n: int, spacing: float = 0.0) -> list[Request]:
    return [Request(i * spacing, i % 2, f"prompt {i}", 4) for i in range(n)]


async def serve(pieces: list[bytes], *, status: int = 200, cut: bool = False, seen: list | None = None):
    async def handler(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append((time.monotonic(), dict(request.headers), await request.json()))
        response = web.StreamResponse(status=status, headers={"x-eldrd-decode": "d1"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for p in pieces:
            await asyncio.sleep(GAP)
            await response.write(p)
        if cut:
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    server = TestServer(app)
    await server.start_server()
    return server


async def results(pieces: list[bytes], n: int = 1, *, timeout_s: float = 60.0, **kw) -> list[client.Result]:
    server = await serve(pieces, **kw)
    try:
        return await client.run(str(server.make_url("/")), trace(n), timeout_s=timeout_s)
    finally:
        await server.close()


async def test_times_of_a_stream():
    found = [(await results([TOKEN, TOKEN, TOKEN, TOKEN, USAGE % 4 + DONE]))[0] for _ in range(5)]
    for r in found:
        assert r.ok
        assert r.worker == "d1"
        assert r.tokens == 4
        assert r.ttft > 0.9 * GAP
        assert len(r.gaps) == 3
        assert sum(r.gaps) == pytest.approx(3 * r.tpot)
    # A busy machine makes some late, not all.
    assert min(r.ttft for r in found) < GAP + 0.2
    assert 0.8 * GAP < statistics.median(r.tpot for r in found) < GAP + 0.2


async def test_tokens_are_the_servers_not_the_events():
    # Four events hold seven tokens: three gaps of 40 ms over six token intervals.
    (r,) = await results([TOKEN, TOKEN, TOKEN, TOKEN, USAGE % 7 + DONE])
    assert r.tokens == 7
    assert sum(r.gaps) > 0
    assert r.tpot == pytest.approx(sum(r.gaps) / 6)


async def test_events_may_be_cut_anywhere():
    stream = TOKEN * 3 + USAGE % 3 + DONE
    (r,) = await results([stream[:20], stream[20:70], stream[70:100], stream[100:-1], stream[-1:]])
    assert (r.outcome, r.tokens, len(r.gaps)) == ("ok", 3, 2)


@pytest.mark.parametrize(
    ("pieces", "options", "outcome"),
    [
        ([TOKEN], {}, "truncated"),
        ([TOKEN], {"cut": True}, "broken"),
        ([TOKEN, b'data: {"error":{"code":500}}\n\n', DONE], {}, "error_event"),
        ([b"{}"], {"status": 503}, "http_503"),
        ([TOKEN] * 100, {"timeout_s": 1.0}, "timeout"),
    ],
)
async def test_failures_have_names(pieces, options, outcome):
    (r,) = await results(pieces, **options)
    assert r.outcome == outcome
    assert not r.ok


async def test_arrivals_do_not_wait_for_answers():
    seen: list = []
    server = await serve([TOKEN] * 30 + [DONE], seen=seen)
    before = time.monotonic()
    try:
        counters: list[client.Progress] = []
        got = await client.run(
            str(server.make_url("/")), trace(5, 0.05), model="m", labels=("code", "math"), started=counters.append
        )
    finally:
        await server.close()
    assert all(r.ok for r in got)
    # The last is sent in its time, and if a busy machine is late, not by the 1.2 s of each answer before it.
    assert 0.2 < seen[-1][0] - before < 0.2 + 3 * 30 * GAP
    assert [h["X-Eldrd-Label"] for _, h, _ in seen] == ["code", "math", "code", "math", "code"]
    assert {b["model"] for _, _, b in seen} == {"m"}
    assert (counters[0].sent, counters[0].ended, counters[0].failed) == (5, 5, 0)


async def test_nobody_listens():
    server = await serve([])
    url = str(server.make_url("/"))
    await server.close()
    assert [r.outcome for r in await client.run(url, trace(2))] == ["broken", "broken"]
