"""Decode counts through eldrd: the hook beside NIXL on D, joined with P's signatures in a capture, equal to the routers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from eldrd.signatures.capture import load_capture
from loadgen.vllm import checks
from loadgen.vllm.truth import Truth

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.vllm.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

OUTPUT = 70
SIDE_BY_SIDE = 12


async def test_captures_hold_what_was_decoded(stack: Stack, tmp_path: Path) -> None:
    """Cold and hit prefixes, chunked prompts, several at once; every request of the capture has exact decode counts."""
    truth = await asyncio.to_thread(Truth, stack.checkpoint)
    prompts = [checks.prompt(stack, n, 900 + n) for n in (1, 31, 32, 33, 300, 2100)]
    prompts += [prompts[4][:200] + checks.prompt(stack, 7 * i, 950 + i) for i in range(1, 5)]
    await stack.eldrd.reload(capture={"dir": str(tmp_path)})
    async with stack.client(stack.eldrd.url) as client:
        made = await asyncio.gather(
            *(
                checks.generate(client, stack.model, p, chat=False, stream=i % 2 == 0, tokens=OUTPUT)
                for i, p in enumerate(prompts)
            )
        )
    await stack.eldrd.reload(capture={"dir": ""})
    capture = load_capture(tmp_path)
    assert capture.decode is not None
    assert await stack.eldrd.metric("eldrd_captured_total", outcome="no_decode") == 0
    by_length = {n: i for i, n in enumerate(capture.prompt_tokens.tolist())}
    assert set(by_length) == {len(p) for p in prompts}
    inexact = 0
    for prompt, output in zip(prompts, made, strict=True):
        at = by_length[len(prompt)]
        assert capture.output_tokens[at] == len(output) == OUTPUT
        routing = await asyncio.to_thread(truth.routing, prompt + output[:-1])
        for counts, part in (
            (capture.prefill[at], routing.part(0, len(prompt))),
            (capture.decode[at], routing.part(len(prompt), len(prompt) + OUTPUT - 1)),
        ):
            result = part.compare(counts)
            assert result.exact or result.near_tie, f"{len(prompt)} tokens: {result}"
            inexact += not result.exact
    # Near ties are rare; how rare is the processor's way to add up.
    assert inexact <= len(prompts)


async def test_nothing_of_the_hooks_reaches_the_client_and_no_capture_means_no_counting(stack: Stack) -> None:
    before = await stack.eldrd.metric("eldrd_signature_frames_total", kind="decoded")
    body = {"model": stack.model, "prompt": checks.prompt(stack, 50, 990), "max_tokens": 5, "ignore_eos": True}
    async with aiohttp.ClientSession() as s, s.post(stack.eldrd.url + "/v1/completions", json=body) as r:
        assert r.status == 200
        assert "eldr" not in ((await r.json()).get("kv_transfer_params") or {})
    await asyncio.sleep(0.3)
    assert await stack.eldrd.metric("eldrd_signature_frames_total", kind="decoded") == before


async def measured(stack: Stack, requests: float = 0.0) -> dict[str, tuple[float, float, float]]:
    """Steps, requests and active experts by decode worker, once there are so many requests and the hooks, which tell once
    a second, have told of all that they counted."""
    read = stack.eldrd.metric

    async def figures() -> dict[str, tuple[float, float, float]]:
        return {
            s.name: (
                await read("eldrd_worker_step_active_experts_count", worker=s.name),
                await read("eldrd_worker_step_requests_sum", worker=s.name),
                await read("eldrd_worker_step_active_experts_sum", worker=s.name),
            )
            for s in stack.fleet.decode
        }

    async def told() -> bool:
        return sum(n for _, n, _ in (await figures()).values()) >= requests

    await stack.eldrd.until(told)
    before = None
    while (now := await figures()) != before:
        before = now
        await asyncio.sleep(2.5)
    return now


async def test_active_experts_of_decode_steps_are_measured(stack: Stack) -> None:
    """One request reads top-k experts a step; several side by side read more, and those of one domain share some."""
    top_k = stack.spec.model.topk
    before = await measured(stack)
    async with stack.client(stack.eldrd.url) as client:
        await checks.generate(
            client, stack.model, checks.prompt(stack, 40, 992), chat=False, stream=True, tokens=OUTPUT
        )
        alone = await measured(stack, sum(n for _, n, _ in before.values()) + OUTPUT)
        [worker] = [w for w in alone if alone[w] != before[w]]
        since = tuple(now - then for then, now in zip(before[worker], alone[worker], strict=True))
        # D computes the prompt's last token itself, and all that it generates but the last one.
        assert since == (OUTPUT, OUTPUT, OUTPUT * top_k)
        prompts = [checks.prompt(stack, 40, 993 + i, 0) for i in range(SIDE_BY_SIDE)]
        await asyncio.gather(
            *(checks.generate(client, stack.model, p, chat=False, stream=True, tokens=OUTPUT) for p in prompts)
        )
    after = await measured(stack, sum(n for _, n, _ in alone.values()) + SIDE_BY_SIDE * OUTPUT)
    steps, requests, active = (sum(now[i] - alone[w][i] for w, now in after.items()) for i in range(3))
    assert requests == SIDE_BY_SIDE * OUTPUT
    assert OUTPUT <= steps < requests
    assert top_k * steps < active < top_k * requests
    hooks = {h["worker"]: h for h in (await stack.eldrd.get("/admin/status"))["hooks"]}
    assert set(after) < set(hooks)
    assert await stack.eldrd.metric("eldrd_worker_steps_missed_total") == 0


async def test_kv_events_of_the_prefill_server_arrive(stack: Stack) -> None:
    stored = await stack.eldrd.metric("eldrd_kv_events_total", kind="stored")
    async with stack.client(stack.eldrd.url) as client:
        await checks.generate(client, stack.model, checks.prompt(stack, 320, 991), chat=False, stream=False)

    async def told() -> bool:
        return await stack.eldrd.metric("eldrd_kv_events_total", kind="stored") >= stored + 10

    await stack.eldrd.until(told)
    assert await stack.eldrd.metric("eldrd_kv_events_total", kind="invalid") == 0


async def test_a_killed_daemon_knows_hot_prefixes_at_once(stack: Stack, tmp_path: Path) -> None:
    """kill -9 under traffic: the hooks keep their rows, and the first request of each cached prefix is exact again."""
    truth = await asyncio.to_thread(Truth, stack.checkpoint)
    prompts = {str(n): checks.prompt(stack, n, 970) for n in (33, 64, 300, 1500)}
    await checks.captured(stack, prompts, 2, tmp_path / "before")
    async with stack.client(stack.eldrd.url) as client:
        traffic = [
            asyncio.create_task(
                checks.generate(
                    client, stack.model, checks.prompt(stack, 200, 980 + i), chat=False, stream=True, tokens=90
                )
            )
            for i in range(4)
        ]
        await asyncio.sleep(0.5)
        assert stack.eldrd.process is not None
        stack.eldrd.process.kill()
        await stack.eldrd.process.wait()
        await asyncio.gather(*traffic, return_exceptions=True)
    await stack.eldrd.start()

    async def hooked() -> bool:
        return len((await stack.eldrd.get("/admin/status"))["hooks"]) == stack.hooks

    await stack.eldrd.until(hooked)
    again = {label: [*ids, *checks.prompt(stack, 5, 971)] for label, ids in prompts.items()}
    await checks.captured(stack, again, 1, tmp_path / "after")
    capture = load_capture(tmp_path / "after")
    assert sorted(str(label) for label in capture.labels) == sorted(again)
    for label, counts in zip(capture.labels, capture.prefill, strict=True):
        result = (await asyncio.to_thread(truth.routing, again[str(label)])).compare(counts)
        assert result.exact or result.near_tie, f"{label}: {result}"
    assert await stack.eldrd.metric("eldrd_signature_frames_total", kind="want") >= 1
