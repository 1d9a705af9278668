"""Scenarios K1-K6: what a prefill worker holds is given back, whenever and however a request ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from stage import CHAT, ask, chat, until

if TYPE_CHECKING:
    from pathlib import Path

    from stage import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def waiting_between_the_legs(stage: Stage, folder: Path) -> None:
    """From now on eldrd waits 3 s after each prefill: for a signature that no hook sends."""
    await stage.reload(capture={"dir": str(folder / "capture")}, signatures={"wait_ms": 3000})


async def released(stage: Stage, n: int = 1) -> None:
    """n hand-offs are given back, none waits for its lease's end, and D has generated nothing."""
    await until(lambda: stage.ends().get("released", 0) >= n)
    assert stage.ends() == {"released": n}
    assert stage.fleet.pinned == 0
    assert stage.generated() == 0


async def test_k1_client_closes_between_the_legs(stage: Stage, tmp_path: Path) -> None:
    await waiting_between_the_legs(stage, tmp_path)
    grown = await stage.change("eldrd_handoffs_total", outcome="released")
    task = asyncio.create_task(stage.post(ask()))

    async def listed() -> bool:
        return len((await stage.eldrd.get("/admin/handoffs"))["open"]) == 1

    await stage.eldrd.until(listed)
    assert stage.fleet.pinned == 1
    task.cancel()
    await released(stage)
    await stage.eldrd.until(stage.settled)
    assert await grown() == 1


@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_k2_client_closes_while_prefill_runs(stage: Stage, path: str) -> None:
    stage.fault(stage.prefill, delay_s=0.2)
    body = ask() if path == "completions" else chat()
    await stage.leave(
        body, lambda: sum(p.received for p in stage.prefill) == 1, CHAT if path == "chat" else "/v1/completions"
    )
    await released(stage)


async def test_k3_long_prefill_is_ended(stage: Stage) -> None:
    """A prefill of 0.6 s, the client leaves at its begin: the worker sees the disconnect and holds nothing."""
    await stage.leave(ask(8000), lambda: any(p.engine.prefill.running for p in stage.prefill))
    await until(lambda: sum(p.engine.finished["abort"] for p in stage.prefill) == 1)
    await until(lambda: not any(p.engine.prefill.running for p in stage.prefill))
    assert stage.ends() == {}
    assert [p.engine.pool.usage for p in stage.prefill] == [0, 0]
    assert stage.generated() == 0


async def test_k4_client_closes_in_the_moment_prefill_ends(stage: Stage) -> None:
    """Leave at 30 moments around the end of a prefill of 30 ms: whoever has the hand-off then, no lease runs out."""
    stage.fault(stage.prefill, delay_s=0.03)
    lost = await stage.change("eldrd_handoffs_total", outcome="lost")

    async def leave(after_s: float) -> None:
        task = asyncio.create_task(stage.post(ask(40, max_tokens=1000)))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for batch in range(3):
        await asyncio.gather(*(leave(0.025 + 0.001 * i + batch * 0.0003) for i in range(10)))
    await until(lambda: stage.fleet.pinned == 0)
    await stage.eldrd.until(stage.settled)
    await until(lambda: not any(d.engine.decode.running for d in stage.decode))
    assert set(stage.ends()) <= {"consumed", "released"}
    assert await lost() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_k5_decode_refuses_after_prefill(stage: Stage, stream: bool) -> None:
    stage.fault(stage.decode, status=422)
    direct = await stage.post(ask(), url=stage.decode[0].url)
    reply = await stage.post(ask(stream=stream))
    assert (reply.status, reply.body) == (422, direct.body)
    await released(stage)
    assert await stage.metric("eldrd_in_flight") == 0


async def test_k6_prefill_worker_dies_with_many_requests(stage: Stage) -> None:
    """Those on the dead worker are prefilled by the other one at once; nobody waits for a limit."""
    stage.fault(stage.prefill[:1], delay_s=30)
    tasks = [asyncio.create_task(stage.post(ask(30 + i, prompt=f"p{i} " * 40))) for i in range(40)]
    await until(lambda: sum(p.received for p in stage.prefill) == 40)
    on_dead = stage.prefill[0].received
    assert on_dead > 5
    began = time.monotonic()
    await stage.prefill[0].stop()
    replies = await asyncio.gather(*tasks)
    assert time.monotonic() - began < 0.8 * stage.base["timeouts"]["prefill_s"]
    assert [r.status for r in replies] == [200] * 40
    assert stage.prefill[1].received == 40
    assert await stage.metric("eldrd_retries_total", role="prefill") >= on_dead
