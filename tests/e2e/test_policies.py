"""Policies that know what runs where, in the daemon: admission and end with the lease, metrics, reload, labels."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp

from loadgen.workloads import DOMAINS, Workload, requests

if TYPE_CHECKING:
    from daemon import Daemon

    from loadgen.fleet.emulated import EmulatedFleet
    from loadgen.workloads import Request


async def post(eldrd: Daemon, session: aiohttp.ClientSession, request: Request, **more: Any) -> str:
    """Serve one request to its end; its decode worker."""
    body = {"model": "emulated-moe", "prompt": request.prompt, "max_tokens": 24, "ignore_eos": True, **more}
    headers = {"X-Eldrd-Label": DOMAINS[request.domain]}
    async with session.post(eldrd.url + "/v1/completions", json=body, headers=headers) as r:
        assert r.status == 200, await r.text()
        await r.read()
        return r.headers["X-Eldrd-Decode"]


async def active(eldrd: Daemon) -> float:
    return await eldrd.metric("eldrd_expected_active_experts")


async def test_union_counts_requests_in_and_out_and_learns(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    await eldrd.reload(decode={"policy": "union"})
    given = await eldrd.metric("eldrd_step_time_coefficient", term="base_ms")
    assert given == 3 * 5.5
    async with aiohttp.ClientSession() as session:
        wanted = requests(Workload(), 60, seed=1)
        running = [asyncio.create_task(post(eldrd, session, r, stream=True, max_tokens=3000)) for r in wanted[:6]]

        async def all_there() -> bool:
            return await eldrd.metric("eldrd_in_flight", role="decode") == 6

        await eldrd.until(all_there)
        assert await active(eldrd) > 8
        # A reload into another policy of the family keeps what runs; one that leaves its client does not stay counted.
        await eldrd.reload(decode={"policy": "soft_band"})
        assert await active(eldrd) > 8
        running[0].cancel()
        await asyncio.gather(*running, return_exceptions=True)

        async def nobody() -> bool:
            return await eldrd.metric("eldrd_in_flight", role="decode") == 0

        await eldrd.until(nobody)
        assert await active(eldrd) == 0
        for at in range(6, 60, 9):
            await asyncio.gather(*(post(eldrd, session, r, stream=True) for r in wanted[at : at + 9]))
    # Steps take a time of their own here: the coefficients have moved.
    assert await eldrd.metric("eldrd_step_time_coefficient", term="base_ms") != given
    lines = await eldrd.logged("request", 60)
    assert {line["decode_reason"] for line in lines[-40:]} == {"soft"}
    assert {line["signature"] for line in lines[-40:]} == {"exact"}
    assert fleet.violations == []


async def test_domain_follows_the_label(eldrd: Daemon) -> None:
    await eldrd.reload(decode={"policy": "domain"}, domain={"workers": {DOMAINS[0]: ["d1"], DOMAINS[1]: ["d2"]}})
    async with aiohttp.ClientSession() as session:
        wanted = requests(Workload(), 40, seed=2)
        homes = {r: Counter[str]() for r in range(4)}
        for request in wanted:
            homes[request.domain][await post(eldrd, session, request, max_tokens=2)] += 1
    assert set(homes[0]) == {"d1"}
    assert set(homes[1]) == {"d2"}
    assert len(homes[2] + homes[3]) == 3
    assert await eldrd.metric("eldrd_routed_total", role="decode", reason="label_unknown") > 0


async def test_configurations_that_cannot_work_change_nothing(eldrd: Daemon) -> None:
    for sections in (
        {"decode": {"policy": "domain"}, "domain": {"workers": {"code": ["d9"]}}},
        {"decode": {"policy": "union"}, "union": {"rank_map": "missing"}},
    ):
        failed = await eldrd.metric("eldrd_reloads_total", outcome="failed")
        await eldrd.reload(**sections)
        assert await eldrd.metric("eldrd_reloads_total", outcome="failed") == failed + 1
        (problem,) = (await eldrd.logged("reload_failed", int(failed) + 1))[-1]["problems"]
        assert ("domain.workers.code" in problem) or ("union.rank_map" in problem and "missing" in problem)
        eldrd.configure(decode={"policy": "jsq"}, domain={"workers": {}}, union={"rank_map": ""})
