"""Captures with decode counts end to end: emulated decode workers with a hook, joined by eldrd with the prefill counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
import pytest
from daemon import Daemon, free_port

from eldrd.signatures.capture import load_capture
from loadgen.fleet.decode import StepCost
from loadgen.fleet.emulated import EmulatedFleet, FleetSpec
from loadgen.workloads import Workload, requests

if TYPE_CHECKING:
    from pathlib import Path


async def test_every_captured_request_has_its_decode_counts(tmp_path: Path) -> None:
    hook = f"tcp://127.0.0.1:{free_port()}"
    spec = FleetSpec(prefill=1, decode=2, hook=hook, decode_hook=True, step_cost=StepCost(0.001, 0.0, 0.0))
    async with EmulatedFleet(spec) as fleet:
        listed = fleet.describe()
        eldrd = Daemon(tmp_path, listed["prefill"], listed["decode"], hook)
        eldrd.configure(capture={"dir": str(tmp_path / "capture")}, signatures={"wait_ms": 10_000})
        await eldrd.start()

        async def hooked() -> bool:
            return len((await eldrd.get("/admin/status"))["hooks"]) == 3

        await eldrd.until(hooked)
        wanted = requests(Workload(), 80, seed=3)
        made: dict[int, list[int]] = {}
        async with aiohttp.ClientSession() as session:

            async def one(i: int) -> None:
                body = {
                    "model": "emulated-moe",
                    "prompt": wanted[i].prompt,
                    "max_tokens": 2 + i,
                    "return_token_ids": True,
                }
                headers = {"X-Eldrd-Label": str(i)}
                async with session.post(eldrd.url + "/v1/completions", json=body, headers=headers) as r:
                    assert r.status == 200
                    answer = await r.json()
                    assert "eldr_id" not in str(answer.get("kv_transfer_params"))
                    made[i] = answer["choices"][0]["token_ids"]

            await asyncio.gather(*(one(i) for i in range(len(wanted))))
        # What the hooks tell of their steps, once a second, is what the engines did.
        for worker in fleet.decode:
            steps, name = worker.engine.decode.steps, worker.spec.name

            async def told(n: int = len(steps), name: str = name) -> bool:
                return await eldrd.metric("eldrd_worker_step_active_experts_count", worker=name) >= n

            await eldrd.until(told)
            for figure, value in (
                ("active_experts_count", len(steps)),
                ("active_experts_sum", sum(s.active for s in steps)),
                ("requests_sum", sum(s.batch for s in steps)),
            ):
                found = await eldrd.metric(f"eldrd_worker_step_{figure}", worker=name)
                assert 0 < found == pytest.approx(value)
        assert await eldrd.stop() == 0
        capture = load_capture(tmp_path / "capture")
        assert capture.decode is not None
        assert len(capture.labels) == len(wanted)
        for i, tokens in made.items():
            at = capture.labels.index(str(i))
            assert capture.output_tokens[at] == len(tokens)
            expected = fleet.model.counts(np.array(tokens[:-1], np.int32)).reshape(capture.decode[at].shape)
            np.testing.assert_array_equal(capture.decode[at], expected)
            assert capture.prefill[at].sum() == capture.prompt_tokens[at] * len(expected) * 8
