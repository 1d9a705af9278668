"""The ELDR path end to end: signatures from the hooks, capture, fit, reload, locality; and what a bad reload changes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
import pytest
from daemon import Daemon, free_port

from eldrd.partitions import file as partition_file
from eldrd.signatures.capture import load_capture
from loadgen.fleet.emulated import EmulatedFleet, FleetSpec
from loadgen.workloads import DOMAINS, Workload, requests

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.workloads import Request

MODEL = "emulated-moe"


async def send(eldrd: Daemon, wanted: list[Request], *, parallel: int = 8) -> list[str]:
    """Serve these requests; the decode worker of each."""
    room = asyncio.Semaphore(parallel)

    async def one(session: aiohttp.ClientSession, request: Request) -> str:
        body = {"model": MODEL, "prompt": request.prompt, "max_tokens": 4}
        headers = {"X-Eldrd-Label": DOMAINS[request.domain]}
        async with room, session.post(eldrd.url + "/v1/completions", json=body, headers=headers) as r:
            answer = await r.text()
            assert r.status == 200, answer
            return r.headers["X-Eldrd-Decode"]

    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(one(session, request) for request in wanted)))


def fit(eldrd: Daemon, capture: Path, out: Path) -> None:
    workers = ",".join(w["name"] for w in eldrd.sections["decode"]["workers"])
    command = [sys.executable, "-m", "eldrd", "fit", "--capture", str(capture), "--workers", workers, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)


async def test_capture_fit_reload_gathers_domains(eldrd: Daemon, fleet: EmulatedFleet, tmp_path: Path) -> None:
    """Signatures captured from live traffic are those of a cold prefill, and their partition gathers domains."""
    capture_dir, partition = tmp_path / "capture", tmp_path / "partition.safetensors"
    await eldrd.reload(capture={"dir": str(capture_dir)})
    calibration = requests(Workload(), 60, seed=7)
    spread = await send(eldrd, calibration)
    assert len(set(spread)) == 3
    # The second half is answered from the prefix caches: the signatures must not show it.
    await send(eldrd, calibration)
    await eldrd.reload(capture={"dir": ""})
    capture = load_capture(capture_dir)
    assert len(capture.prefill) == 120
    whole = capture.prompt_tokens * len(capture.geometry.layers) * capture.geometry.top_k
    assert (capture.prefill.sum(axis=(1, 2)) == whole).all()
    cold = {tuple(c.ravel()) for c in capture.prefill[:60]}
    assert {tuple(c.ravel()) for c in capture.prefill[60:]} == cold
    assert np.array_equal(
        np.sort(capture.prefill[:60].reshape(60, -1), axis=0), np.sort(capture.prefill[60:].reshape(60, -1), axis=0)
    )
    assert Counter(capture.labels)[DOMAINS[0]] > 0

    await asyncio.to_thread(fit, eldrd, capture_dir, partition)
    await eldrd.reload(decode={"policy": "eldr", "tau": 0.0}, partitions={"file": str(partition)})
    fresh = [r for r in requests(Workload(two_domains=0.0), 80, seed=8) if r.domain == 2]
    workers = Counter(await send(eldrd, fresh, parallel=1))
    assert workers.most_common(1)[0][1] >= 0.8 * len(fresh), workers
    lines = (await eldrd.logged("request", 120 + len(fresh)))[-len(fresh) :]
    assert {line["signature"] for line in lines} == {"exact"}
    assert {line["decode_reason"] for line in lines} == {"band"}
    assert fleet.violations == []


async def test_a_restarted_daemon_wants_its_rows_again(eldrd: Daemon, fleet: EmulatedFleet, tmp_path: Path) -> None:
    """Hot cached prefixes: the new process has no rows, the hooks still have."""
    await eldrd.reload(capture={"dir": str(tmp_path / "capture")})
    hot = requests(Workload(), 4, seed=3)
    await send(eldrd, hot)
    assert await eldrd.stop() == 0
    await eldrd.start()

    async def hooks() -> bool:
        return len((await eldrd.get("/admin/status"))["hooks"]) == 2

    await eldrd.until(hooks)
    await send(eldrd, hot)
    assert await eldrd.metric("eldrd_signatures_total", state="exact") == 4
    assert await eldrd.metric("eldrd_signature_frames_total", kind="want") > 0


async def test_no_hook_falls_back_and_counts(tmp_path: Path) -> None:
    """Workers without hooks: the wait ends, load decides, and both are counted."""
    capture = tmp_path / "capture"
    async with EmulatedFleet(FleetSpec(prefill=1, decode=2)) as fleet:
        listed = fleet.describe()
        eldrd = Daemon(tmp_path, listed["prefill"], listed["decode"], f"tcp://127.0.0.1:{free_port()}")
        eldrd.configure(signatures={"wait_ms": 5}, capture={"dir": str(capture)})
        await eldrd.start()
        await send(eldrd, requests(Workload(), 3, seed=4))
        assert await eldrd.metric("eldrd_signatures_total", state="missing") == 3
        assert not capture.exists()
        await eldrd.stop()


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"decode": {"tau": 7}}, "decode.tau"),
        ({"decode": {"policy": "nearest"}}, "decode.policy"),
        ({"decode": {"policy": "eldr"}, "partitions": {"file": "missing.safetensors"}}, "partitions.file"),
        ({"server": {"lisen": "x"}}, "server.lisen"),
    ],
)
async def test_a_bad_reload_changes_nothing(
    eldrd: Daemon, sections: dict[str, dict[str, object]], problem: str
) -> None:
    before = await eldrd.get("/admin/status")
    await eldrd.reload(**sections)
    assert await eldrd.metric("eldrd_reloads_total", outcome="failed") == 1
    after = await eldrd.get("/admin/status")
    assert (after["generation"], after["policy"]) == (before["generation"], before["policy"])
    (line,) = await eldrd.logged("reload_failed")
    assert problem in line["problems"][0]
    assert str(eldrd.config) in line["problems"][0]
    await send(eldrd, requests(Workload(), 1, seed=5))


async def test_a_partition_of_another_fleet_is_refused(eldrd: Daemon, fleet: EmulatedFleet, tmp_path: Path) -> None:
    capture_dir, path = tmp_path / "capture", tmp_path / "partition.safetensors"
    await eldrd.reload(capture={"dir": str(capture_dir)})
    await send(eldrd, requests(Workload(), 8, seed=6))
    await eldrd.reload(capture={"dir": ""})
    await asyncio.to_thread(fit, eldrd, capture_dir, path)
    smaller = eldrd.sections["decode"]["workers"][:2]
    await eldrd.reload(decode={"policy": "eldr", "workers": smaller}, partitions={"file": str(path)})
    assert "d2" in (await eldrd.logged("reload_failed"))[-1]["problems"][0]
    assert partition_file.load(path).workers == ("d0", "d1", "d2")


async def test_reload_disturbs_no_stream_and_removed_workers_finish(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    """SIGHUP that takes the worker of a running stream away: the stream ends whole, no new request goes there."""
    prompt = requests(Workload(), 1, seed=9)[0].prompt
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as s, s.post(eldrd.url + "/v1/completions", json=body) as r:
        first = await r.content.readany()
        gone = r.headers["X-Eldrd-Decode"]
        rest = [w for w in eldrd.sections["decode"]["workers"] if w["name"] != gone]
        await eldrd.reload(decode={"workers": rest})
        used = await send(eldrd, requests(Workload(), 6, seed=10))
        assert gone not in used
        text = first + await r.read()
    assert text.endswith(b"data: [DONE]\n\n")
    assert text.count(b'"text"') == 400
    assert await eldrd.metric("eldrd_in_flight") == 0
    assert f'worker="{gone}"' not in "\n".join(
        line for line in (await eldrd.get("/metrics")).splitlines() if line.startswith("eldrd_in_flight")
    )


async def test_a_config_that_cannot_be_used_ends_with_status_2(tmp_path: Path) -> None:
    config = tmp_path / "eldrd.toml"
    config.write_text(
        '[prefill]\nworkers = []\n[decode]\nworkers = [{name = "d0", url = "http://127.0.0.1:1"}]\ntau = -1\n'
    )
    for command in ("serve", "check"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "eldrd", command, "--config", str(config), stderr=asyncio.subprocess.PIPE
        )
        _, err = await process.communicate()
        assert process.returncode == 2
        assert f"{config}: decode.tau = -1" in err.decode()
        assert "prefill.workers" in err.decode()


async def test_second_signal_ends_at_once(eldrd: Daemon) -> None:
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": 5000, "stream": True, "ignore_eos": True}
    assert eldrd.process is not None
    async with aiohttp.ClientSession() as s, s.post(eldrd.url + "/v1/completions", json=body) as r:
        await r.content.readany()
        eldrd.process.send_signal(signal.SIGTERM)
        await eldrd.logged("draining")
        eldrd.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(eldrd.process.wait(), 60) == 1


async def test_a_reload_that_replaces_every_worker_refuses_nobody(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    """Requests before, during (in prefill, with all their decode workers taken away) and right after the reload."""
    p, d = eldrd.sections["prefill"]["workers"], eldrd.sections["decode"]["workers"]
    wanted = requests(Workload(), 60, seed=12)

    async def steadily(session: aiohttp.ClientSession) -> list[int]:
        statuses = []

        async def one(prompt: str) -> None:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
            async with session.post(eldrd.url + "/v1/completions", json=body) as r:
                await r.read()
                statuses.append(r.status)

        async with asyncio.TaskGroup() as tasks:
            for request in wanted:
                tasks.create_task(one(str(request.prompt)))
                await asyncio.sleep(0.01)
        return statuses

    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(steadily(session))
        await asyncio.sleep(0.15)
        await eldrd.reload(prefill={"workers": p[:1]}, decode={"workers": d[:1]})
        await eldrd.reload(prefill={"workers": p[1:]}, decode={"workers": d[1:]})
        assert set(await running) == {200}
    assert fleet.violations == []
    assert await eldrd.metric("eldrd_in_flight") == 0
