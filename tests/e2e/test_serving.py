"""The main job end to end: the official client through eldrd, over emulated prefill and decode workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest

from loadgen.workloads import Workload, requests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from daemon import Daemon

    from loadgen.fleet.emulated import EmulatedFleet

MODEL = "emulated-moe"


@pytest.fixture
async def client(eldrd: Daemon) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=eldrd.url + "/v1", api_key="sk-secret-key", max_retries=0) as client:
        yield client


@pytest.fixture
async def plain(fleet: EmulatedFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    url = fleet.plain[0].url
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def prompts(n: int, seed: int = 1) -> list[str]:
    return [r.prompt for r in requests(Workload(), n, seed)]


async def completion(client: openai.AsyncOpenAI, prompt: str, *, stream: bool, **more: Any) -> str:
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, stream=stream, **{"max_tokens": 20, **more}
    )
    if not stream:
        return answer.choices[0].text
    return "".join([e.choices[0].text async for e in answer if e.choices])


async def chat(client: openai.AsyncOpenAI, prompt: str, *, stream: bool) -> str:
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt}]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=stream, max_completion_tokens=20
    )
    if not stream:
        return answer.choices[0].message.content or ""
    return "".join([e.choices[0].delta.content or "" async for e in answer if e.choices])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [completion, chat])
async def test_answers_equal_a_plain_server(
    ask: Any, stream: bool, client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI, fleet: EmulatedFleet
) -> None:
    for prompt in prompts(3):
        expected = await ask(plain, prompt, stream=False)
        assert expected
        assert await ask(client, prompt, stream=stream) == expected
    assert fleet.violations == []


async def test_many_at_once_all_come_right(
    client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI, fleet: EmulatedFleet, eldrd: Daemon
) -> None:
    texts = prompts(40)
    expected = await asyncio.gather(*(completion(plain, t, stream=False) for t in texts))
    got = await asyncio.gather(*(completion(client, t, stream=i % 2 == 0) for i, t in enumerate(texts)))
    assert got == expected
    assert fleet.violations == []
    assert await eldrd.metric("eldrd_in_flight") == 0
    assert await eldrd.metric("eldrd_handoffs_open") == 0
    assert await eldrd.metric("eldrd_handoffs_total", outcome="consumed") == 40
    used = {line["decode"] for line in await eldrd.logged("request", 40)}
    assert used == {"d0", "d1", "d2"}


async def test_one_token_is_answered_by_prefill(client: openai.AsyncOpenAI, eldrd: Daemon) -> None:
    text = prompts(1)[0]
    whole = await completion(client, text, stream=False, max_tokens=1)
    assert whole
    assert await completion(client, text, stream=True, max_tokens=1) == whole
    assert await eldrd.metric("eldrd_routed_total", role="decode") == 0
    assert await eldrd.metric("eldrd_handoffs_total") == 0


async def test_usage_comes_through(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=prompts(1)[0], max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    events = [e async for e in stream]
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 7


async def test_models_metrics_and_logs(client: openai.AsyncOpenAI, eldrd: Daemon) -> None:
    assert [m.id async for m in client.models.list()] == [MODEL]
    text = prompts(1)[0]
    await completion(client, text, stream=True)
    (line,) = await eldrd.logged("request")
    assert line["outcome"] == "ok"
    assert line["status"] == 200
    assert line["prefill"] in ("p0", "p1")
    assert line["decode"].startswith("d")
    assert line["output_tokens"] == 20
    assert line["prompt_tokens"] > 0
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    whole_log = eldrd.log.read_text()
    assert "sk-secret-key" not in whole_log
    assert text.split()[0] not in whole_log
    assert await eldrd.metric("eldrd_requests_total", outcome="ok") == 1
    assert await eldrd.metric("eldrd_output_tokens_total") == 20


async def test_request_ids(eldrd: Daemon) -> None:
    body = {"model": MODEL, "prompt": prompts(1)[0], "max_tokens": 3}
    async with aiohttp.ClientSession() as s:
        ids = []
        for _ in range(2):
            async with s.post(eldrd.url + "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as r:
                assert r.headers["X-Request-Id"] == "mine"
                ids.append((await r.json())["id"])
    assert ids[0] != ids[1]


BAD = [
    ("/v1/completions", b"{", 400, "BadRequestError"),
    ("/v1/completions", b"[]", 400, "BadRequestError"),
    ("/v1/completions", b"[" * 10_000 + b"]" * 10_000, 400, "BadRequestError"),
    ("/v1/completions", b'{"model":"emulated-moe"}', 400, "BadRequestError"),
    ("/v1/chat/completions", b'{"model":"emulated-moe"}', 400, "BadRequestError"),
    ("/v1/chat/completions", b'{"model":"emulated-moe","messages":[]}', 400, "BadRequestError"),
    ("/v1/completions", b'{"model":"other","prompt":"a"}', 404, "NotFoundError"),
    ("/v1/completions", b'{"model":7,"prompt":"a"}', 400, "BadRequestError"),
    ("/v1/completions", b'{"model":"emulated-moe","prompt":"a","stream":"yes"}', 400, "BadRequestError"),
    ("/v1/completions", b'{"model":"emulated-moe","prompt":["a",7]}', 400, "BadRequestError"),
    ("/v1/completions", b'{"model":"emulated-moe","prompt":"a","n":-1}', 400, "BadRequestError"),
    (
        "/v1/completions",
        b'{"model":"emulated-moe","prompt":"a","kv_transfer_params":{"do_remote_prefill":true}}',
        400,
        "BadRequestError",
    ),
    (
        "/v1/completions",
        b'{"model":"emulated-moe","prompt":"a","kv_transfer_param\\u0073":{"do_remote_prefill":true}}',
        400,
        "BadRequestError",
    ),
    ("/v1/embeddings", b"{}", 404, "NotFoundError"),
]


async def test_bad_input_is_an_error_object(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    async with aiohttp.ClientSession() as s:
        for path, body, status, kind in BAD:
            async with s.post(eldrd.url + path, data=body) as r:
                assert r.status == status, body[:80]
                error = (await r.json())["error"]
                assert error["type"] == kind
                assert error["code"] == status
                assert set(error) == {"message", "type", "param", "code"}
        async with s.get(eldrd.url + "/v1/completions") as r:
            assert r.status == 405
    assert await eldrd.metric("eldrd_routed_total") == 0


async def test_worker_errors_pass_unchanged(eldrd: Daemon, client: openai.AsyncOpenAI) -> None:
    body = {"model": MODEL, "prompt": "word " * 100_000, "max_tokens": 5}
    async with aiohttp.ClientSession() as s, s.post(eldrd.url + "/v1/completions", json=body) as r:
        assert r.status == 400
        assert set((await r.json())["error"]) == {"message", "type", "param", "code"}
    assert await completion(client, prompts(1)[0], stream=False)


async def test_body_limit(eldrd: Daemon) -> None:
    await eldrd.reload(server={"max_body_bytes": 4096})
    body = {"model": MODEL, "prompt": "a " * 4000}
    async with aiohttp.ClientSession() as s, s.post(eldrd.url + "/v1/completions", json=body) as r:
        assert r.status == 413
        assert (await r.json())["error"]["code"] == 413


async def test_no_worker(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    for worker in fleet.decode:
        await worker.stop()

    async def none_usable() -> bool:
        return await eldrd.metric("eldrd_worker_usable", role="decode") == 0

    await eldrd.until(none_usable)
    async with aiohttp.ClientSession() as s:
        body = {"model": MODEL, "prompt": prompts(1)[0]}
        async with s.post(eldrd.url + "/v1/completions", json=body) as r:
            assert r.status == 503
            assert r.headers["Retry-After"]
            assert (await r.json())["error"]["type"] == "ServiceUnavailableError"
        async with s.get(eldrd.url + "/ready") as r:
            assert r.status == 503
        async with s.get(eldrd.url + "/health") as r:
            assert r.status == 200
        async with s.get(eldrd.url + "/v1/models") as r:
            assert r.status == 200


async def test_decode_that_refuses_is_replaced(
    eldrd: Daemon, fleet: EmulatedFleet, client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI
) -> None:
    texts = prompts(6)
    expected = [await completion(plain, t, stream=False) for t in texts]
    await fleet.decode[0].stop()
    got = [await completion(client, t, stream=True) for t in texts]
    assert got == expected
    assert fleet.violations == []


async def test_client_that_leaves_frees_everything(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    body = {"model": MODEL, "prompt": prompts(1)[0], "max_tokens": 1500, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as s:
        async with s.post(eldrd.url + "/v1/completions", json=body) as r:
            await r.content.readany()
            assert await eldrd.metric("eldrd_in_flight", role="decode") == 1
            r.close()

        async def gone() -> bool:
            return await eldrd.metric("eldrd_in_flight") == 0

        await eldrd.until(gone)
    (line,) = await eldrd.logged("request")
    assert line["outcome"] == "client_gone"


async def test_drain_ends_streams_and_refuses_new(eldrd: Daemon, client: openai.AsyncOpenAI) -> None:
    text = prompts(1)[0]
    task = asyncio.create_task(completion(client, text, stream=True, max_tokens=1000, extra_body={"ignore_eos": True}))

    async def decoding() -> bool:
        return await eldrd.metric("eldrd_in_flight", role="decode") > 0

    await eldrd.until(decoding)
    assert eldrd.process is not None
    eldrd.process.terminate()
    assert len((await task).split()) == 1000
    assert await asyncio.wait_for(eldrd.process.wait(), 60) == 0
