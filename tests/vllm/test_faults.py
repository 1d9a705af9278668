"""Faults on real vLLM: hand-offs given back, clients that leave, expired leases, killed and restarted servers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from eldrd.fleet import vllm
from loadgen.vllm import checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.vllm.fleet import VllmServer
    from loadgen.vllm.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def met(stack: Stack) -> None:
    """Every decode server has taken KV from the prefill server: the first meeting of two NIXL agents takes seconds, and a
    release waits for it."""
    await stack.eldrd.reload(decode={"policy": "round_robin"}, partitions={"file": ""})
    async with stack.client(stack.eldrd.url) as client:
        for i in range(2 * len(stack.fleet.decode)):
            await checks.generate(client, stack.model, checks.prompt(stack, 40, 300 + i), chat=False, stream=False)


async def gauge(server: VllmServer, name: str) -> float:
    async with aiohttp.ClientSession() as s, s.get(server.url + "/metrics") as r:
        text = await r.text()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


async def within(seconds: float, condition: Callable[[], Any], what: str) -> float:
    """Wait for the condition; how long it took."""
    begin = time.monotonic()
    while not await condition():
        assert time.monotonic() - begin < seconds, what
        await asyncio.sleep(0.05)
    return time.monotonic() - begin


async def idle(stack: Stack) -> bool:
    servers = [*stack.fleet.prefill, *stack.fleet.decode]
    return not any([await gauge(s, "num_requests_running") + await gauge(s, "num_requests_waiting") for s in servers])


async def unpinned(server: VllmServer) -> bool:
    return await gauge(server, "kv_cache_usage_perc") == 0


async def prefill_by_hand(stack: Stack, ids: list[int]) -> dict[str, Any]:
    """A prefill that nobody takes: its transfer params."""
    body = vllm.prefill_body({"model": stack.model, "prompt": ids}, "by-hand", hand_off=True)
    async with aiohttp.ClientSession() as s:
        url = stack.fleet.prefill[0].url + "/v1/completions"
        async with s.post(url, data=body, headers={"Content-Type": "application/json"}) as r:
            params = vllm.transfer_params(json.loads(await r.read()))
    assert params is not None
    return params


async def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as s, s.post(url + "/v1/completions", json=body) as r:
        return r.status, await r.read()


async def serves(stack: Stack, n: int = 50) -> None:
    """n mixed requests at once, all of them right."""
    prompts = [checks.prompt(stack, 5 + 29 * (i % 9), 500 + i) for i in range(n)]
    async with stack.client(stack.plain_url) as plain, stack.client(stack.eldrd.url) as through:
        expected = [await checks.expect(plain, stack.model, p, tokens=8) for p in prompts]
        got = await asyncio.gather(
            *(
                checks.generate(through, stack.model, p, chat=False, stream=i % 2 == 0, tokens=8)
                for i, p in enumerate(prompts)
            )
        )
    assert [(e, ids) for e, ids in zip(expected, got, strict=True) if not e.allows(ids)] == []


async def test_a_hand_off_is_given_back_by_a_request_that_d_refuses(stack: Stack) -> None:
    """P's blocks stay pinned while nobody takes them, and are free at the release, not at the end of the lease of 30 s."""
    prefill, decode = stack.fleet.prefill[0], stack.fleet.decode[0]
    await within(60, lambda: unpinned(prefill), "blocks pinned before the test")
    params = await prefill_by_hand(stack, checks.prompt(stack, 900, 201))
    await asyncio.sleep(1)
    pinned = await gauge(prefill, "kv_cache_usage_perc")
    assert pinned > 0
    assert await gauge(prefill, "num_requests_running") == 0
    status, _ = await post(decode.url, json.loads(vllm.release_body(params)))
    assert status == 404
    took = await within(20, lambda: unpinned(prefill), "still pinned after the release")
    print(f"kv_cache_usage_perc {pinned:.3f} -> 0 in {took:.2f} s")


async def meet(stack: Stack) -> None:
    """Every decode server has read from P: one that has not needs its NIXL handshake, and real work after that, before it
    passes a release on."""

    async def decoded() -> list[float]:
        return [
            await stack.eldrd.metric("eldrd_routed_total", role="decode", worker=d.name) for d in stack.fleet.decode
        ]

    before = await decoded()
    async with stack.client(stack.eldrd.url) as client:
        while any(now == then for now, then in zip(await decoded(), before, strict=True)):
            ids = checks.prompt(stack, 70, random.getrandbits(30))
            await checks.generate(client, stack.model, ids, chat=False, stream=False, tokens=8)


@pytest.mark.parametrize("after_s", [0.02, 0.15, 0.5])
async def test_a_client_that_leaves_frees_both_engines(stack: Stack, after_s: float) -> None:
    """During prefill, at its end, in the stream: nothing is generated to its end, nothing stays pinned on P. How long that
    took is printed: less than a second on a machine that does nothing else."""

    async def generated() -> float:
        return sum([await gauge(d, "generation_tokens_total") for d in stack.fleet.decode])

    await meet(stack)
    before = await generated()
    ids = checks.prompt(stack, 3000, int(after_s * 1000))
    body = {"model": stack.model, "prompt": ids, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await post(stack.eldrd.url, body)

    async def over() -> bool:
        ended = await stack.eldrd.metric("eldrd_in_flight") + await stack.eldrd.metric("eldrd_handoffs_open") == 0
        return ended and await idle(stack)

    took = await within(20, over, "an engine still runs")
    freed = await within(20, lambda: unpinned(stack.fleet.prefill[0]), "P still holds blocks")
    assert await generated() - before < 900
    print(f"left after {after_s} s: idle in {took:.2f} s, unpinned in {freed:.2f} s more")


async def test_expired_hand_offs_are_never_used(stack: Stack) -> None:
    """With a limit of no age at all every hand-off is too old: the request fails, D is never asked."""
    before = await stack.eldrd.metric("eldrd_routed_total", role="decode")
    expired = await stack.eldrd.metric("eldrd_handoffs_total", outcome="expired")
    await stack.eldrd.reload(timeouts={"handoff_s": 1e-9})
    try:
        status, answer = await post(
            stack.eldrd.url, {"model": stack.model, "prompt": checks.prompt(stack, 40, 202), "max_tokens": 4}
        )
        assert status == 502
        assert "error" in json.loads(answer)
        assert await stack.eldrd.metric("eldrd_handoffs_total", outcome="expired") == expired + 3
        assert await stack.eldrd.metric("eldrd_routed_total", role="decode") == before
    finally:
        await stack.eldrd.reload(timeouts={"handoff_s": 25.0})


async def test_a_killed_decode_server(stack: Stack) -> None:
    """kill -9 in the stream: an error event and a closed connection; the rest is served; restarted, it serves again."""
    body = {
        "model": stack.model,
        "prompt": checks.prompt(stack, 50, 203),
        "max_tokens": 3000,
        "stream": True,
        "ignore_eos": True,
    }
    got = bytearray()
    async with aiohttp.ClientSession() as s, s.post(stack.eldrd.url + "/v1/completions", json=body) as r:
        name = r.headers["X-Eldrd-Decode"]
        victim = next(d for d in stack.fleet.decode if d.name == name)
        got += await r.content.readany()
        await asyncio.to_thread(victim.kill)
        with pytest.raises(aiohttp.ClientPayloadError):
            got += await r.content.read()
    assert got.count(b'data: {"error"') <= 1
    assert b"[DONE]" not in got
    await serves(stack, 10)
    await asyncio.to_thread(victim.start)
    await asyncio.to_thread(victim.wait)

    async def back() -> bool:
        return await stack.eldrd.metric("eldrd_worker_usable", role="decode") == 2

    await stack.eldrd.until(back)
    await serves(stack)


async def test_a_killed_prefill_server(stack: Stack) -> None:
    """kill -9 in the prefill, with no other P: 502 or 503 within seconds; restarted under a new engine id, it serves."""
    prefill = stack.fleet.prefill[0]
    body = {"model": stack.model, "prompt": checks.prompt(stack, 3500, 204), "max_tokens": 4}
    asked = asyncio.create_task(post(stack.eldrd.url, body))

    async def there() -> bool:
        return await stack.eldrd.metric("eldrd_in_flight", role="prefill") == 1

    await stack.eldrd.until(there)
    begin = time.monotonic()
    await asyncio.to_thread(prefill.kill)
    status, answer = await asked
    assert status in (502, 503)
    assert "error" in json.loads(answer)
    assert time.monotonic() - begin < 20
    await asyncio.to_thread(prefill.start)
    await asyncio.to_thread(prefill.wait)

    async def back() -> bool:
        return await stack.eldrd.ready() and len((await stack.eldrd.get("/admin/status"))["hooks"]) == stack.hooks

    await stack.eldrd.until(back)
    await serves(stack)


async def test_prefill_lost_after_its_answer(stack: Stack) -> None:
    """P dies between its answer and D's pull: no wrong tokens, an error with a status, and the next request is right."""
    prefill, decode = stack.fleet.prefill[0], stack.fleet.decode[0]
    ids = checks.prompt(stack, 300, 205)
    params = await prefill_by_hand(stack, ids)
    await asyncio.to_thread(prefill.kill)
    begin = time.monotonic()
    status, answer = await post(
        decode.url, {"model": stack.model, "prompt": ids, "max_tokens": 8, "kv_transfer_params": params}
    )
    print(f"D without P: {status} in {time.monotonic() - begin:.2f} s")
    assert status == 500
    assert "error" in json.loads(answer)
    await asyncio.to_thread(prefill.start)
    await asyncio.to_thread(prefill.wait)

    async def back() -> bool:
        return await stack.eldrd.ready() and len((await stack.eldrd.get("/admin/status"))["hooks"]) == stack.hooks

    await stack.eldrd.until(back)
    await serves(stack, 10)


async def test_a_restarted_eldrd_has_whole_signatures_at_once(stack: Stack) -> None:
    """Hot prefixes: the hook still has the rows that the new process lacks."""
    ids = checks.prompt(stack, 400, 206)
    await stack.eldrd.reload(capture={"dir": str(stack.out / "capture-restart")})
    async with stack.client(stack.eldrd.url) as client:
        await checks.generate(client, stack.model, ids, chat=False, stream=False)
        assert await stack.eldrd.stop() == 0
        await stack.eldrd.start()

        async def hooked() -> bool:
            return len((await stack.eldrd.get("/admin/status"))["hooks"]) == stack.hooks

        await stack.eldrd.until(hooked)
        await checks.generate(client, stack.model, ids, chat=False, stream=False)
    assert await stack.eldrd.metric("eldrd_signatures_total", state="exact") == 1
    assert await stack.eldrd.metric("eldrd_signature_frames_total", kind="want") >= 1


async def test_nothing_leaked(stack: Stack) -> None:
    """After all of the above."""
    await within(60, lambda: idle(stack), "an engine still runs")
    await within(60, lambda: unpinned(stack.fleet.prefill[0]), "P still holds blocks after its lease")
    assert await stack.eldrd.metric("eldrd_in_flight") == 0
    assert await stack.eldrd.metric("eldrd_handoffs_open") == 0
    assert not stack.eldrd.lines("request_failed")
    assert not stack.eldrd.lines("library")
