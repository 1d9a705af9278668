"""Scenarios E1-E9: errors reach the client as they are, and nothing degrades in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest
from stage import CHAT, COMPLETIONS, ask, chat, until

if TYPE_CHECKING:
    from stage import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_e1_prefill_answers_400(stage: Stage) -> None:
    """An over-long prompt: P's own words reach the client, nobody tries again, no breaker hears of it."""
    direct = await stage.post(ask(9000, max_tokens=1), url=stage.prefill[0].url)
    opened = await stage.metric("eldrd_worker_breaker_opened")
    for w in stage.prefill:
        w.received = 0
    reply = await stage.post(ask(9000))
    assert (reply.status, reply.body) == (400, direct.body)
    assert reply.error["param"] == "input_tokens"
    assert sum(p.received for p in stage.prefill) == 1
    assert sum(d.received for d in stage.decode) == 0
    assert await stage.metric("eldrd_worker_breaker_opened") == opened


async def test_e1_decode_answers_400(stage: Stage) -> None:
    stage.fault(stage.decode, status=400)
    opened = await stage.metric("eldrd_worker_breaker_opened")
    retried = await stage.change("eldrd_retries_total")
    reply = await stage.post(ask())
    assert (reply.status, reply.error["message"]) == (400, "Emulated fault")
    assert sum(p.received for p in stage.prefill) == 1
    assert await retried() == 0
    assert await stage.metric("eldrd_worker_breaker_opened") == opened


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_e2_stream_refused_by_decode(stage: Stage, path: str) -> None:
    stage.fault(stage.decode, status=422)
    reply = await stage.post(ask(stream=True) if path == COMPLETIONS else chat(stream=True), path)
    assert reply.status == 422
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.error["message"] == "Emulated fault"


@pytest.mark.parametrize("stream", [False, True])
async def test_e3_decode_refuses_connections(stage: Stage, stream: bool) -> None:
    """One down: another serves, with the same hand-off. All down: 503."""
    expected = (await stage.post(ask())).text
    await stage.decode[0].stop()
    await stage.decode[1].stop()
    before = stage.prefill[0].received + stage.prefill[1].received
    for _ in range(3):
        reply = await stage.post(ask(stream=stream))
        assert reply.whole
        assert reply.text == expected
    assert stage.prefill[0].received + stage.prefill[1].received == before + 3
    await stage.decode[2].stop()
    reply = await stage.post(ask(stream=stream))
    assert reply.status == 503
    assert reply.error["type"] == "ServiceUnavailableError"
    assert int(reply.headers["Retry-After"]) >= 1


async def test_e4_decode_dies_between_events(stage: Stage) -> None:
    stage.fault(stage.decode, die_after_chunks=3)
    opened = await stage.change("eldrd_requests_total", outcome="decode_lost_reset")
    reply = await stage.post(ask(stream=True, max_tokens=200))
    assert reply.status == 200
    assert reply.cut
    assert b"[DONE]" not in reply.body
    assert reply.body.endswith(b"\n\n")
    error = orjson.loads(reply.events[-1])["error"]
    assert (error["code"], error["type"]) == (502, "BadGatewayError")
    assert all(b'"error"' not in e for e in reply.events[:-1])
    assert 3 <= len(reply.events) - 1 < 200
    await stage.eldrd.until(stage.settled)
    assert await opened() == 1


async def test_e4_decode_dies_inside_a_chunk(stage: Stage) -> None:
    """No event can be put in the middle of a chunk: the answer ends so that nobody takes it for whole."""
    stage.fault(stage.decode, die_after_chunks=3, die_inside=True)
    reply = await stage.post(ask(stream=True, max_tokens=200))
    assert reply.status == 200
    assert reply.cut
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_e5_error_objects_are_not_wrapped(stage: Stage, where: str) -> None:
    stage.fault(getattr(stage, where), status=400)
    direct = await stage.post(ask(), url=getattr(stage, where)[0].url)
    reply = await stage.post(ask())
    assert (reply.status, reply.body) == (400, direct.body)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"{", b"", b"null", b'"a"', b"[" * 10_000, b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000, b"\xff"],
)
async def test_e6_bodies_that_are_no_request(stage: Stage, path: str, body: bytes) -> None:
    reply = await stage.post(body, path)
    assert reply.status == 400
    assert reply.error["type"] == "BadRequestError"
    assert sum(p.received for p in stage.prefill) == 0


async def test_e7_no_prefill_worker(stage: Stage) -> None:
    for p in stage.prefill:
        await p.stop()
    reply = await stage.post(ask())
    assert reply.status == 503
    assert "prefill" in reply.error["message"]
    assert "Retry-After" in reply.headers
    # Without a fallback no decode worker prefills by itself.
    assert sum(d.received for d in stage.decode) == 0


@pytest.mark.parametrize("path", ["/v1/embeddings", "/", "/v1/completions/", "/v1/../v1/completions", "/tokenize"])
async def test_e7_unknown_paths(stage: Stage, path: str) -> None:
    reply = await stage.raw(
        b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}" % path.encode()
    )
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert orjson.loads(body)["error"]["type"] == "NotFoundError"
    assert sum(w.received for w in (*stage.prefill, *stage.decode)) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_e8_prefill_without_transfer_params(stage: Stage, stream: bool) -> None:
    stage.fault(stage.prefill, drop_params=True)
    counted = await stage.change("eldrd_requests_total", outcome="prefill_no_transfer_params")
    reply = await stage.post(ask(stream=stream))
    assert reply.status == 502
    assert reply.error["type"] == "BadGatewayError"
    assert await counted() == 1
    assert sum(d.received for d in stage.decode) == 0
    # What the worker holds without having said so ends with its lease.
    await until(lambda: stage.fleet.pinned == 0)


async def test_e8_transfer_params_that_name_nothing(stage: Stage) -> None:
    """D cannot load the KV and says so; it does not prefill in silence."""
    stage.fault(stage.prefill, wrong_params=True)
    reply = await stage.post(ask())
    assert reply.status == 500
    assert sum(d.engine.local_prefills for d in stage.decode) == 0
    assert [v.kind for v in stage.fleet.violations] == ["unknown"]
    stage.fleet.violations.clear()


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_e9_bad_requests_open_no_breaker(stage: Stage, where: str) -> None:
    opened = await stage.metric("eldrd_worker_breaker_opened")
    stage.fault(getattr(stage, where), status=400)
    bad: list[Any] = [ask(), ask(min_tokens=-1), ask(max_tokens=99_999), ask(20_000)]
    for i in range(20):
        assert (await stage.post(bad[i % len(bad)])).status == 400
    stage.fault(getattr(stage, where))
    assert (await stage.post(ask())).whole
    assert await stage.metric("eldrd_worker_breaker_opened") == opened
    assert await stage.settled()
