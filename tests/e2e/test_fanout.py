"""Requests for several sequences, and aliases: merged answers equal a plain server's, choice by choice."""

from __future__ import annotations

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
    async with openai.AsyncOpenAI(base_url=eldrd.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def plain(fleet: EmulatedFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=fleet.plain[0].url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def prompts(n: int) -> list[str]:
    return [r.prompt for r in requests(Workload(), n, 21)]


async def ask(client: openai.AsyncOpenAI, *, stream: bool, chat: bool = False, **more: Any) -> dict[int, str]:
    """The text of each choice."""
    create: Any = client.chat.completions.create if chat else client.completions.create
    answer = await create(model=MODEL, max_tokens=15, stream=stream, **more)
    if not stream:
        return {c.index: c.message.content if chat else c.text for c in answer.choices}
    texts: dict[int, str] = {}
    ids = set()
    async for event in answer:
        ids.add(event.id)
        for c in event.choices:
            texts[c.index] = texts.get(c.index, "") + ((c.delta.content or "") if chat else c.text)
    assert len(ids) == 1
    return texts


async def idle(eldrd: Daemon) -> bool:
    return await eldrd.metric("eldrd_in_flight") == 0 and await eldrd.metric("eldrd_handoffs_open") == 0


async def drain(response: aiohttp.ClientResponse, into: bytearray) -> None:
    async for data in response.content.iter_any():
        into += data


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(
    stream: bool, client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI, fleet: EmulatedFleet, eldrd: Daemon
) -> None:
    texts = prompts(3)
    expected = [(await ask(plain, stream=False, prompt=t, temperature=0))[0] for t in texts]
    got = await ask(client, stream=stream, prompt=texts, temperature=0)
    assert got == dict(enumerate(expected))
    assert fleet.violations == []
    assert await eldrd.metric("eldrd_handoffs_total", outcome="consumed") == 3
    assert await eldrd.metric("eldrd_in_flight") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_several_samples(
    stream: bool, chat: bool, client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI, fleet: EmulatedFleet
) -> None:
    """A seed counts up over the samples, so that they differ and can be repeated."""
    text = prompts(1)[0]
    content: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    expected = [(await ask(plain, stream=False, chat=chat, seed=40 + i, **content))[0] for i in range(3)]
    assert len(set(expected)) == 3
    got = await ask(client, stream=stream, chat=chat, seed=40, n=3, **content)
    assert got == dict(enumerate(expected))
    assert fleet.violations == []


async def test_usage_counts_a_prompt_once(client: openai.AsyncOpenAI) -> None:
    texts = prompts(2)
    single = [await client.completions.create(model=MODEL, prompt=t, max_tokens=5) for t in texts]
    tokens = [a.usage.prompt_tokens for a in single if a.usage is not None]
    answer = await client.completions.create(
        model=MODEL, prompt=texts, n=2, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(tokens)
    assert answer.usage.completion_tokens == 20
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    stream = await client.completions.create(
        model=MODEL, prompt=texts, n=2, max_tokens=5, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    events = [e async for e in stream]
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    assert events[-1].usage.prompt_tokens == sum(tokens)
    assert events[-1].choices == []


async def test_single_tokens_are_merged_too(client: openai.AsyncOpenAI, eldrd: Daemon) -> None:
    answer = await client.completions.create(model=MODEL, prompt=prompts(2), max_tokens=1)
    assert [c.index for c in answer.choices] == [0, 1]
    stream = await client.completions.create(model=MODEL, prompt=prompts(2), max_tokens=1, stream=True)
    assert {c.index async for e in stream for c in e.choices} == {0, 1}
    assert await eldrd.metric("eldrd_routed_total", role="decode") == 0


async def test_one_refused_part_is_the_answer(client: openai.AsyncOpenAI, eldrd: Daemon) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt=["good text", "word " * 100_000], stream=stream)
    await eldrd.until(lambda: idle(eldrd))


async def test_a_lost_part_ends_the_stream_with_an_error(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    for worker in fleet.decode:
        worker.faults.die_after_chunks = 5
    body = {"model": MODEL, "prompt": prompts(2), "max_tokens": 50, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as s, s.post(eldrd.url + "/v1/completions", json=body) as r:
        got = bytearray()
        with pytest.raises(aiohttp.ClientPayloadError):
            await drain(r, got)
    assert got.count(b'data: {"error"') == 1
    assert b"[DONE]" not in got
    await eldrd.until(lambda: idle(eldrd))


@pytest.mark.parametrize("stream", [False, True])
async def test_alias(stream: bool, eldrd: Daemon, client: openai.AsyncOpenAI, plain: openai.AsyncOpenAI) -> None:
    eldrd.config.write_text(eldrd.config.read_text() + f'\n[[models]]\nname = "{MODEL}"\naliases = ["short"]\n')
    eldrd.configure = lambda **_: None  # type: ignore[method-assign]
    await eldrd.reload()
    assert [m.id async for m in client.models.list()] == [MODEL, "short"]
    text = prompts(1)[0]
    expected = (await ask(plain, stream=False, prompt=text, temperature=0))[0]
    answer: Any = await client.completions.create(
        model="short", prompt=text, max_tokens=15, temperature=0, stream=stream
    )
    if stream:
        events = [e async for e in answer]
        assert {e.model for e in events} == {"short"}
        assert "".join(e.choices[0].text for e in events) == expected
    else:
        assert answer.model == "short"
        assert answer.choices[0].text == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": "2"},
        {"n": 129},
        {"n": 2, "best_of": 3},
        {"prompt": ["a", ""]},
        {"prompt": ["a"] * 129},
        {"n": True},
    ],
)
async def test_what_is_refused(fields: dict[str, Any], eldrd: Daemon) -> None:
    body = {"model": MODEL, "prompt": "a", **fields}
    async with aiohttp.ClientSession() as s, s.post(eldrd.url + "/v1/completions", json=body) as r:
        assert r.status == 400
        assert (await r.json())["error"]["param"] in ("n", "best_of", "prompt")
