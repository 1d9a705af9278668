"""The refitter: when it runs, what it counts, that it survives, and that the kept state is what the next start uses."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from eldrd.config import ConfigError, Refit, load
from eldrd.partitions import file as partition_file
from eldrd.partitions import refitter as module
from eldrd.partitions import source
from eldrd.partitions.cluster import warm_up
from eldrd.partitions.file import Partition, PartitionError
from eldrd.partitions.refitter import OUTCOMES, Refitter
from eldrd.signatures.geometry import Geometry
from eldrd.signatures.receiver import Signature
from eldrd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GEOMETRY = Geometry("m", 9, (0, 1), 8, 2, 16)


def partition(workers: tuple[str, ...] = ("d0", "d1")) -> Partition:
    k = len(workers)
    centroids = np.random.default_rng(0).random((k, 16)).astype(np.float32)
    return Partition(
        centroids=centroids / np.linalg.norm(centroids, axis=1, keepdims=True),
        idf=np.ones((2, 8), np.float32),
        layers=np.array([0, 1], np.int32),
        workers=workers,
        geometry=GEOMETRY,
        tau=0.1,
        requests=k,
        rho=None,
        cluster_sizes=(1,) * k,
        created="2026-01-01T00:00:00+00:00",
    )


def signature(n: int, state: str = "exact", geometry: Geometry = GEOMETRY) -> Signature:
    counts = np.random.default_rng(n).poisson(np.where(np.arange(16) % 8 // 4 == n % 2, 9, 0.5)).astype(np.int32)
    return Signature(state, counts, 16, geometry)


class Fixture:
    def __init__(self, start: Partition | None) -> None:
        self.partition = start
        self.metrics = Metrics()
        self.refitter = Refitter(lambda: self.partition, self.swap, self.metrics)

    def swap(self, new: Partition) -> None:
        self.partition = new

    def count(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("eldrd_refits_total", {"outcome": outcome}) or 0.0

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not done():  # noqa: ASYNC110, metrics tell nobody
                await asyncio.sleep(0.005)


SETTINGS = Refit(enabled=True, window_s=30, every_s=0.01, requests=10)


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    warm_up()


async def test_swaps_keeps_and_persists(tmp_path: Path) -> None:
    f, state = Fixture(partition()), tmp_path / "state"
    await f.refitter.configure(SETTINGS, state)
    await f.until(lambda: f.count("few") > 1)
    for n in range(40):
        f.refitter.add(signature(n))
        f.refitter.add(signature(n, "partial"))
    assert f.refitter.requests == 40
    await f.until(lambda: f.count("swapped") == 1)
    assert f.partition is not None
    assert f.partition.cluster_sizes == (20, 20)
    await f.until(lambda: f.count("kept") > 1)
    assert partition_file.load(state).centroids.tolist() == f.partition.centroids.tolist()
    assert (f.metrics.registry.get_sample_value("eldrd_refit_objective") or 0) > 0.9
    await f.refitter.close()
    assert f.refitter.requests == 0
    f.refitter.add(signature(1))
    assert f.refitter.requests == 0
    assert sum(f.count(o) for o in OUTCOMES) == f.count("few") + f.count("kept") + 1


async def test_old_requests_leave_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    f = Fixture(partition())
    await f.refitter.configure(SETTINGS.model_copy(update={"window_s": 12.5, "requests": 2_000}), None)
    for n in range(40):
        now = float(n)
        f.refitter.add(signature(n))
    await f.until(lambda: f.count("few") == 1)
    assert f.refitter.requests == 13
    now = 100.0
    await f.until(lambda: f.count("few") == 3)
    assert f.refitter.requests == 0
    await f.refitter.close()


async def test_other_models_and_no_partition_do_not_count() -> None:
    f = Fixture(partition())
    await f.refitter.configure(SETTINGS, None)
    for n in range(40):
        f.refitter.add(signature(n, geometry=replace(GEOMETRY, fingerprint=1)))
    await f.until(lambda: f.count("few") > 1)
    f.partition = None
    before = f.count("few")
    await f.until(lambda: f.count("few") > before + 1)
    await f.refitter.close()
    assert f.count("swapped") == 0


async def test_a_reload_meanwhile_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    f = Fixture(partition())
    reloaded = partition(("a", "b"))

    def slow(*arguments: object) -> object:
        f.partition = reloaded
        return object()

    monkeypatch.setattr(module, "refit", slow)
    await f.refitter.configure(SETTINGS, None)
    for n in range(40):
        f.refitter.add(signature(n))
    await f.until(lambda: f.count("stale") == 1)
    await f.refitter.close()
    assert f.partition is reloaded


async def test_failures_are_counted_and_it_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    f = Fixture(partition())
    with monkeypatch.context() as patch:
        patch.setattr(module, "refit", lambda *_: math.sqrt(-1))
        await f.refitter.configure(SETTINGS, tmp_path / "no" / "such" / "folder")
        for n in range(40):
            f.refitter.add(signature(n))
        await f.until(lambda: f.count("failed") > 1)
    await f.until(lambda: f.count("swapped") == 1)  # kept nowhere, but in use
    await f.refitter.close()


async def test_switched_off_and_on() -> None:
    f = Fixture(partition())
    await f.refitter.configure(SETTINGS.model_copy(update={"enabled": False}), None)
    f.refitter.add(signature(1))
    assert f.refitter.requests == 0
    await f.refitter.configure(SETTINGS, None)
    f.refitter.add(signature(1))
    await f.refitter.configure(SETTINGS, None)  # a reload that changes nothing keeps the window
    assert f.refitter.requests == 1
    await f.refitter.configure(SETTINGS.model_copy(update={"every_s": 9.0}), None)
    assert f.refitter.requests == 0
    await f.refitter.close()


def configured(tmp_path: Path, workers: str = "d0,d1", *, enabled: bool = True, state: str = "") -> Path:
    listed = ", ".join(
        f'{{ name = "{w}", url = "http://127.0.0.1:{i + 2}" }}' for i, w in enumerate(workers.split(","))
    )
    path = tmp_path / "eldrd.toml"
    path.write_text(f"""
[prefill]
workers = [{{ name = "p0", url = "http://127.0.0.1:1" }}]
[decode]
policy = "eldr"
workers = [{listed}]
[signatures]
listen = "tcp://127.0.0.1:9"
[partitions]
file = "p"
[refit]
enabled = {str(enabled).lower()}
state = "{state}"
""")
    return path


def test_the_start_takes_what_refits_made(tmp_path: Path) -> None:
    base, refitted = partition(), replace(partition(), centroids=partition().centroids[::-1].copy())
    partition_file.save(base, tmp_path / "p")
    path = configured(tmp_path)

    def centroids(current: Partition | None = None) -> list[list[float]]:
        loaded = source.load(load(path), GEOMETRY, current)
        assert loaded is not None
        return loaded.centroids.tolist()

    assert centroids() == base.centroids.tolist()
    partition_file.save(refitted, tmp_path / "p.refit")
    assert centroids() == refitted.centroids.tolist()
    third = replace(refitted, centroids=base.centroids[[0, 0]])
    assert centroids(third) == third.centroids.tolist()
    configured(tmp_path, enabled=False)
    assert centroids(third) == base.centroids.tolist()
    configured(tmp_path, state="elsewhere")
    assert source.state_path(load(path)) == tmp_path / "elsewhere"
    assert centroids() == base.centroids.tolist()
    configured(tmp_path)
    (tmp_path / "p.refit").write_bytes(b"broken")
    assert centroids() == base.centroids.tolist()
    partition_file.save(replace(refitted, idf=base.idf * 2), tmp_path / "p.refit")
    assert centroids() == base.centroids.tolist()


def test_workers_of_the_fleet(tmp_path: Path) -> None:
    partition_file.save(partition(), tmp_path / "p")
    loaded = source.load(load(configured(tmp_path, "d1,x,y")), None, None)
    assert loaded is not None
    assert loaded.workers == ("d1", "x", "y")
    with pytest.raises(PartitionError, match="workers the partition lacks: x"):
        source.load(load(configured(tmp_path, "d0,d1,x", enabled=False)), None, None)
    with pytest.raises(PartitionError, match="workers the fleet lacks: d0, d1"):
        source.load(load(configured(tmp_path, "x,y")), None, None)
    with pytest.raises(PartitionError, match="fingerprint"):
        source.load(load(configured(tmp_path)), replace(GEOMETRY, fingerprint=1), None)


def test_refit_needs_a_partition(tmp_path: Path) -> None:
    path = configured(tmp_path)
    path.write_text(path.read_text().replace('"eldr"', '"jsq"').replace('file = "p"', 'file = ""'))
    with pytest.raises(ConfigError, match=r"refit\.enabled needs partitions\.file"):
        load(path)
