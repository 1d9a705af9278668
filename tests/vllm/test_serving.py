"""The main job on real vLLM: outputs, signatures and locality through eldrd, by NIXL, with the hook in the prefill server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from loadgen.vllm import checks, demo
from loadgen.vllm.truth import Truth

if TYPE_CHECKING:
    from loadgen.vllm.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_outputs_equal_a_plain_servers(stack: Stack) -> None:
    """Completions and chat, streamed and plain, by the official client, prompts of 1 to 3,000 tokens."""
    found = await checks.outputs(stack)
    assert len(found) == 4 * len(checks.LENGTHS)
    assert [o for o in found if not o.equal or o.tokens != 16] == []


async def test_kv_moved_and_decode_computed_no_prompt(stack: Stack) -> None:
    """The KV came by the connector: decode servers took external tokens, and hand-offs ended as consumed."""
    ids = checks.prompt(stack, 300, 77)
    async with stack.client(stack.eldrd.url) as client:
        await checks.generate(client, stack.model, ids, chat=False, stream=True)

    async def moved() -> bool:
        external = 0.0
        async with aiohttp.ClientSession() as s:
            for server in stack.fleet.decode:
                async with s.get(server.url + "/metrics") as r:
                    for line in (await r.text()).splitlines():
                        if line.startswith("vllm:external_prefix_cache_hits_total"):
                            external += float(line.rsplit(" ", 1)[1])
        return external >= 299

    async def none_open() -> bool:
        return await stack.eldrd.metric("eldrd_handoffs_open") == 0

    await stack.eldrd.until(moved)
    await stack.eldrd.until(none_open)
    assert await stack.eldrd.metric("eldrd_handoffs_total", outcome="consumed") > 0


async def test_signatures_equal_the_routers(stack: Stack) -> None:
    """Cold, prefix hits, chunked, shared prefixes, several at once; only near ties of the gate may differ."""
    truth = await asyncio.to_thread(Truth, stack.checkpoint)
    found = await checks.signatures(stack, truth)
    assert len(found) == 30
    assert [s for s in found if not s.exact and not s.near_tie] == []
    # Near ties are rare; how rare is the processor's way to add up.
    assert sum(s.exact for s in found) >= 20


async def test_fit_and_reload_gather_domains(stack: Stack) -> None:
    plan = demo.Plan(out=stack.out, requests=80, rate=8.0, output_tokens=12)
    runs, pure = await demo.gather_domains(stack, plan)
    assert all(r.ok for results in runs.values() for r in results)
    assert pure["eldr"] >= 0.9
    # Eighty requests of four domains on two servers by chance: 0.59, and 0.8 less than once in a million times.
    assert pure["jsq"] < 0.8

    async def logged() -> bool:
        return sum(line["policy"] == "eldr" for line in stack.eldrd.lines("request")) >= 80

    await stack.eldrd.until(logged)
    lines = [line for line in stack.eldrd.lines("request") if line["policy"] == "eldr"]
    assert {line["signature"] for line in lines} == {"exact"}
    assert {line["decode_reason"] for line in lines} == {"band"}


async def test_usage_tells_prefills_cached_tokens(stack: Stack) -> None:
    """prompt and completion tokens are the request's, cached_tokens are P's: 0 cold, whole blocks the second time."""
    ids = checks.prompt(stack, 200, 78)
    cached = []
    async with stack.client(stack.eldrd.url) as client:
        for _ in range(2):
            answer = await client.completions.create(model=stack.model, prompt=ids, max_tokens=5, temperature=0)
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (200, 5)
            details = answer.usage.prompt_tokens_details
            cached.append((details and details.cached_tokens) or 0)
    assert cached == [0, 192]


async def test_errors_of_real_servers_pass(stack: Stack) -> None:
    async with aiohttp.ClientSession() as s:
        for body, status in (
            ({"prompt": checks.prompt(stack, 4500, 1)}, 400),
            ({"prompt": "a", "temperature": -1}, 400),
            ({"prompt": "a", "model": "other"}, 404),
            ({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, 400),
        ):
            async with s.post(stack.eldrd.url + "/v1/completions", json={"model": stack.model, **body}) as r:
                assert r.status == status, body
                assert set((await r.json())["error"]) >= {"message", "type", "code"}
    async with stack.client(stack.eldrd.url) as client:
        assert await checks.generate(client, stack.model, [5, 6, 7], chat=False, stream=False)
