"""The HTTP side over scripted workers: bad requests, bad workers, clients that leave, and what is logged of them."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Exchange, Stack

MARKER = "MARKER-7f3a"


@pytest.fixture(autouse=True)
def lines() -> Iterator[list[Any]]:
    """What the daemon logs while a test runs; nothing of a request's content may be in it."""
    with structlog.testing.capture_logs() as lines:
        yield lines
    assert MARKER not in str(lines)
    assert not [line for line in lines if line["event"] == "request_failed"], lines


def outcomes(lines: list[Any]) -> list[str]:
    return [line["outcome"] for line in lines if line["event"] == "request"]


async def raw(stack: Stack, data: bytes) -> tuple[int, bytes]:
    client = await stack.connect()
    client.writer.write(data)
    status, _, body = await client.answer()
    client.close()
    return status, body


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


# -- bad requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
        b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\nabcd",
        b"content-encoding: gzip\r\ncontent-length: 12\r\n\r\n" + gzip.compress(b"{}")[:12],
        b"content-encoding: deflate\r\ncontent-length: 4\r\n\r\nabcd",
    ],
)
async def test_a_body_that_cannot_be_read_is_the_clients_fault(stack: Stack, rest: bytes) -> None:
    assert (await raw(stack, POST + rest))[0] == 400


@pytest.mark.parametrize("sections", [{"server": {"max_body_bytes": 1024}}])
@pytest.mark.parametrize("chunked", [False, True])
async def test_too_large(stack: Stack, chunked: bool, lines: list[Any]) -> None:
    size = 200_000
    if chunked:
        data = POST + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"
    else:
        data = POST + b"content-length: %d\r\n\r\n" % size + b"x" * size
    status, body = await raw(stack, data)
    assert status == 413
    assert orjson.loads(body)["error"]["code"] == 413
    assert outcomes(lines) == ["too_large"]


@pytest.mark.parametrize("sections", [{"server": {"max_body_bytes": 1024}}])
async def test_a_small_body_may_not_unfold_into_a_large_one(stack: Stack) -> None:
    bomb = gzip.compress(b"x" * 10_000_000)
    # Cut to the size that passes as compressed.
    assert (await raw(stack, POST + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb))[0] in (
        400,
        413,
    )


async def test_expect_continue(stack: Stack) -> None:
    client = await stack.connect()
    body = b'{"model":"m","prompt":"x","stream":true}'
    client.writer.write(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
    assert b" 100 " in await client.head()
    client.writer.write(body)
    assert (await client.answer())[0] == 200
    assert all(b"expect" not in e.head.lower() for w in (stack.P, stack.D) for e in w.exchanges)
    client.close()


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /v1/completions", 405),
        (b"POST /v1/models", 405),
        (b"GET /nothing", 404),
        (b"OPTIONS *", 404),
        (b"GET http://elsewhere/health", 200),
        (b"GET /health?x=1", 200),
        (b"HEAD /health", 200),
        (b"GET //health", 404),
        (b"GET /%68ealth", 404),
        (b"GET /v1/../health", 404),
        (b"GET /\xff\xfe", 404),
        (b"CONNECT host:80", 404),
        (b"FOO /health", 405),
    ],
)
async def test_odd_targets(stack: Stack, line: bytes, status: int) -> None:
    client = await stack.connect()
    client.writer.write(line + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    head = await client.head()
    assert int(head.split()[1]) in (status, 400)
    client.close()


@pytest.mark.parametrize("value", [b"caf\xc3\xa9", b"\xff\xfe", b"a" * 500, "日本".encode()])
async def test_odd_request_ids(stack: Stack, value: bytes) -> None:
    client = await stack.connect()
    for body in (b"{", b'{"model":"m","prompt":"x","stream":true}'):
        client.send(body, b"x-request-id: " + value)
        _, head, _ = await client.answer()
        assert head.lower().count(b"x-request-id:") <= 1
    client.close()


async def test_client_headers_stay_here(stack: Stack) -> None:
    client = await stack.connect()
    client.ask(b"authorization: Bearer " + MARKER.encode(), b"cookie: a", b"traceparent: 00-1-2-01", b"x-evil: 1")
    assert (await client.answer())[0] == 200
    for worker in (stack.P, stack.D):
        (exchange,) = worker.exchanges
        names = [h.split(b":")[0].lower() for h in exchange.head.split(b"\r\n")[1:] if h]
        assert names == [b"host", b"content-type", b"content-length", b"x-request-id", b"traceparent"]
    client.close()


@pytest.mark.parametrize("body", ["{" + MARKER, json.dumps([MARKER]), json.dumps({"model": MARKER, "prompt": MARKER})])
async def test_refused_requests_leave_no_content_in_the_log(stack: Stack, body: str, lines: list[Any]) -> None:
    client = await stack.connect()
    client.send(body.encode())
    await client.answer()
    client.close()
    assert len(outcomes(lines)) == 1


async def test_body_never_completed(stack: Stack, lines: list[Any]) -> None:
    client = await stack.connect()
    client.writer.write(POST + b"content-length: 100\r\n\r\n{")
    await stack.until(lambda: any(not c.idle for c in stack.server.connections))
    client.close()
    await stack.until(lambda: not stack.server.connections)
    assert outcomes(lines) == ["client_gone"]


# -- bad workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        [], 1, "x", None, {}, {"choices": {}}, {"choices": [None]}, {"choices": 1}, {"usage": 1}, {"usage": {}},
        {"choices": [{"finish_reason": "stop"}]}, {"choices": [{"finish_reason": "stop", "text": 1}], "usage": []},
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"max_tokens": 1}, {"stream": False}])
async def test_a_prefill_answer_that_is_none(stack: Stack, answer: Any, more: dict[str, Any]) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.json(answer)

    stack.P.script = script
    client = await stack.connect()
    client.ask(**more)
    status, _, body = await client.answer()
    assert status in (200, 502)
    if status == 502:
        assert orjson.loads(body)["error"]["code"] == 502
    client.close()


async def test_prefill_answer_of_no_json(stack: Stack) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{{{")

    stack.P.script = script
    client = await stack.connect()
    client.ask()
    assert (await client.answer())[0] == 502
    client.close()


@pytest.mark.parametrize("sections", [{"timeouts": {"prefill_s": 0.1}}])
@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
async def test_prefill_that_never_ends(stack: Stack, head: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(head)
        await asyncio.sleep(1)

    stack.P.script = script
    client = await stack.connect()
    client.ask()
    assert (await client.answer())[0] == 504
    client.close()


@pytest.mark.parametrize("sections", [{"timeouts": {"first_byte_s": 0.1}}])
@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 422 No\r\ncontent-length: 9\r\n\r\n{"])
async def test_decode_that_never_answers(stack: Stack, head: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        if b"eldrd-release" in exchange.body:
            await exchange.json({}, 404)
            return
        await exchange.write(head)
        await asyncio.sleep(1)

    stack.D.script = script
    client = await stack.connect()
    client.ask()
    assert (await client.answer())[0] == 504
    client.close()


async def test_finished_at_prefill(stack: Stack) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.json({**stack.prefilled, "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})

    stack.P.script = script
    client = await stack.connect()
    client.ask()
    _, head, body = await client.answer()
    assert b"text/event-stream" in head.lower()
    assert body.endswith(b"data: [DONE]\n\n")
    assert stack.D.exchanges == [] or b"eldrd-release" in stack.D.exchanges[0].body
    client.close()


# -- clients that leave -------------------------------------------------------------------------------------------------


async def test_gone_while_prefill_runs(stack: Stack, lines: list[Any]) -> None:
    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(10)
        await exchange.json(stack.prefilled)

    stack.P.script = slow
    client = await stack.connect()
    client.ask()
    await stack.until(lambda: len(stack.P.exchanges) == 1)
    client.close()
    await stack.settled()
    assert outcomes(lines) == ["client_gone"]
    assert stack.D.exchanges == []


async def test_gone_just_before_prefill_ends(stack: Stack) -> None:
    """The worker keeps the KV: it is given back through D, whose own answer nobody waits for."""

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        await exchange.json(stack.prefilled)

    stack.P.script = slow
    client = await stack.connect()
    client.ask()
    await stack.until(lambda: len(stack.P.exchanges) == 1)
    client.close()
    await stack.until(lambda: len(stack.outcomes) == 1)
    assert stack.outcomes == ["released"]


async def test_gone_while_decode_is_asked(stack: Stack, lines: list[Any]) -> None:
    async def silent(exchange: Exchange) -> None:
        await asyncio.sleep(0.5)

    stack.D.script = silent
    client = await stack.connect()
    client.ask()
    await stack.until(lambda: len(stack.D.exchanges) == 1)
    client.close()
    await stack.settled()
    assert outcomes(lines) == ["client_gone"]
    assert stack.outcomes == ["consumed"]


@pytest.mark.parametrize("delay_ms", range(0, 30, 2))
async def test_gone_at_any_time(stack: Stack, delay_ms: int) -> None:
    """Nothing is left behind, whatever was under way: ``stack`` looks when the test ends."""

    async def prefill(exchange: Exchange) -> None:
        await asyncio.sleep(0.005)
        await exchange.json(stack.prefilled)

    async def decode(exchange: Exchange) -> None:
        await asyncio.sleep(0.005)
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        await exchange.write(head, *[b"9\r\ndata: a\n\n\r\n"] * 10, b"0\r\n\r\n", pause_s=0.001)

    stack.P.script, stack.D.script = prefill, decode
    clients = [await stack.connect() for _ in range(8)]
    for client in clients:
        client.ask(stream=bool(delay_ms % 4))
    await asyncio.sleep(delay_ms / 1e3)
    for client in clients:
        client.close()
    await stack.settled()
    stack.P.script, stack.D.script = prefill, decode
    client = await stack.connect()
    client.ask()
    status, _, body = await client.answer()
    assert (status, body) == (200, b"9\r\ndata: a\n\n\r\n" * 10 + b"0\r\n\r\n")
    client.close()


async def test_what_is_no_http_is_counted_not_logged(stack: Stack, lines: list[Any]) -> None:
    status, body = await raw(stack, b"GET / HTTP/9\r\n\r\n")
    assert status == 400
    assert orjson.loads(body)["error"]["type"] == "BadRequestError"
    assert stack.metrics.requests.labels("", 400, "malformed").value == 1
    assert lines == []


@pytest.mark.parametrize("stream", [True, False])
async def test_parts_that_end_at_prefill_name_no_decode_worker(stack: Stack, stream: bool) -> None:
    async def script(exchange: Exchange) -> None:
        choice = {"index": 0, "text": "a", "finish_reason": "stop"}
        await exchange.json({**stack.prefilled, "choices": [choice]})

    stack.P.script = script
    client = await stack.connect()
    client.ask(n=2, stream=stream)
    status, head, _ = await client.answer()
    assert status == 200
    assert b"x-eldrd-decode" not in head.lower()
    client.close()
