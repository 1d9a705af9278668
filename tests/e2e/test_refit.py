"""Online refit end to end: centroids follow live traffic, survive a restart, and workers join and leave by SIGHUP."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

from eldrd.partitions import file as partition_file
from eldrd.partitions.fit import fit
from eldrd.signatures.capture import load_capture
from loadgen.workloads import Workload, requests

if TYPE_CHECKING:
    from pathlib import Path

    from daemon import Daemon

    from loadgen.fleet.emulated import EmulatedFleet

ONE_DOMAIN = Workload(two_domains=0.0)


async def send(eldrd: Daemon, n: int, seed: int, *, parallel: int = 8) -> tuple[list[str], list[int]]:
    """The decode worker and the domain of each of n requests."""
    room, wanted = asyncio.Semaphore(parallel), requests(ONE_DOMAIN, n, seed)

    async def one(session: aiohttp.ClientSession, prompt: object) -> str:
        body = {"model": "emulated-moe", "prompt": prompt, "max_tokens": 4}
        async with room, session.post(eldrd.url + "/v1/completions", json=body) as r:
            assert r.status == 200, await r.text()
            return r.headers["X-Eldrd-Decode"]

    async with aiohttp.ClientSession() as session:
        workers = list(await asyncio.gather(*(one(session, r.prompt) for r in wanted)))
    return workers, [r.domain for r in wanted]


def homes(workers: list[str], domains: list[int]) -> float:
    """Share of the requests that go where most of their domain goes."""
    pairs = Counter(zip(domains, workers, strict=True))
    return sum(max(n for (d, _), n in pairs.items() if d == domain) for domain in set(domains)) / len(workers)


async def test_refit_follows_traffic_and_survives(eldrd: Daemon, fleet: EmulatedFleet, tmp_path: Path) -> None:
    capture_dir, path = tmp_path / "capture", tmp_path / "partition.safetensors"
    await eldrd.reload(capture={"dir": str(capture_dir)})
    await send(eldrd, 60, seed=1)
    await eldrd.reload(capture={"dir": ""})
    base = fit(load_capture(capture_dir), ["d0", "d1", "d2"])
    # Centroids that say nothing: a partition as after a drift of all traffic.
    partition_file.save(replace(base, centroids=np.roll(base.centroids, 7, axis=1)), path)
    await eldrd.reload(
        decode={"policy": "eldr", "tau": 0.0},
        partitions={"file": str(path)},
        refit={"enabled": True, "every_s": 0.2, "requests": 30},
    )
    assert (await eldrd.get("/admin/status"))["policy"] == "eldr"
    await send(eldrd, 80, seed=2)

    async def refitted() -> bool:
        return await eldrd.metric("eldrd_refits_total", outcome="swapped") >= 1

    await eldrd.until(refitted)
    # Three clusters of four domains split one or two of them: mostly 0.9 to 1, one half by chance.
    workers, domains = await send(eldrd, 80, seed=3)
    assert homes(workers, domains) > 0.7
    assert set(workers) == {"d0", "d1", "d2"}
    assert eldrd.lines("refit_failed") == []

    # Joined and left: no restart, no error, the file still names the old workers.
    listed = eldrd.sections["decode"]["workers"]
    await eldrd.reload(decode={"policy": "eldr", "tau": 0.0, "workers": listed[:2]})
    assert (await eldrd.get("/admin/status"))["partition"]["workers"] == ["d0", "d1"]
    workers, _ = await send(eldrd, 20, seed=4)
    assert set(workers) == {"d0", "d1"}
    await eldrd.reload(decode={"policy": "eldr", "tau": 0.0, "workers": listed})
    assert (await eldrd.get("/admin/status"))["partition"]["workers"] == ["d0", "d1", "d2"]
    assert await eldrd.metric("eldrd_reloads_total", outcome="failed") == 0
    assert "d2" in (await send(eldrd, 60, seed=5))[0]

    # A restart goes on where it left off.
    await asyncio.sleep(0.5)
    assert await eldrd.stop() == 0
    kept = partition_file.load(path.with_name(path.name + ".refit"))
    eldrd.configure(refit={"enabled": True, "every_s": 3600.0})
    await eldrd.start()
    assert (await eldrd.get("/admin/status"))["partition"]["created"] == kept.created
    workers, domains = await send(eldrd, 80, seed=6)
    assert homes(workers, domains) > 0.7
    assert set(workers) == {"d0", "d1", "d2"}
    assert fleet.violations == []
