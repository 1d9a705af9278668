"""How long fit and online refit take, and how long a refit holds the event loop: `python -m loadgen.bench.refit`.

Size: 48 layers x 128 experts (Qwen3-30B-A3B). The loop is watched as lateness.py says; the same without refits tells what
is the machine's own doing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from eldrd.config import Refit
from eldrd.partitions import cluster
from eldrd.partitions import file as partition_file
from eldrd.partitions.fit import fit
from eldrd.partitions.refitter import Refitter, yield_to_loop
from eldrd.routing import build as routing
from eldrd.signatures.capture import Capture
from eldrd.signatures.geometry import Geometry
from eldrd.signatures.receiver import Signature
from eldrd.telemetry import logs
from eldrd.telemetry.metrics import Metrics
from loadgen.bench.lateness import lateness

if TYPE_CHECKING:
    from eldrd.partitions.file import Partition

GEOMETRY: Final = Geometry("bench", 1, tuple(range(48)), 128, 8, 16)
_DOMAINS: Final = 8


def capture(n: int, seed: int) -> Capture:
    """n requests of 200 prompt and 200 output tokens of _DOMAINS domains that prefer experts of their own, the more so
    the deeper the layer."""
    rng = np.random.default_rng(seed)
    layers, experts = GEOMETRY.shape
    depth = np.arange(layers)[:, None] / layers
    tastes = rng.dirichlet(np.full(experts, 0.2), (_DOMAINS, layers))
    prefill, decode = np.empty((2, n, layers, experts), np.int32)
    for i in range(n):
        own = 0.6 * tastes[i % _DOMAINS] + 0.4 * rng.dirichlet(np.full(experts, 0.3), layers)
        mixed = depth * own + (1 - depth) * rng.dirichlet(np.full(experts, 0.3), layers)
        prefill[i], decode[i] = rng.poisson(mixed * 200 * GEOMETRY.top_k, (2, layers, experts))
    tokens = np.full(n, 200, np.int32)
    return Capture(GEOMETRY, prefill, tokens, tokens, [None] * n, decode)


async def watch(partition: Partition, rows: list[Signature], seconds: float, *, refits: bool) -> dict[str, float]:
    """Lateness of the loop while the partition is refitted four times a second to traffic that drifts, and swapped as
    the daemon does: with a new policy, the state on disk."""
    now = partition
    policy: Any = None
    metrics = Metrics()

    def swap(new: Partition) -> None:
        nonlocal now, policy
        now = new
        policy = routing.build("eldr", partition=new, workers=new.workers, tau=0.1)

    with tempfile.TemporaryDirectory() as folder:
        refitter = Refitter(lambda: now, swap, metrics)
        settings = Refit(enabled=refits, window_s=3600, every_s=0.25, requests=len(rows) // 2)
        await refitter.configure(settings, Path(folder) / "state")

        async def traffic() -> None:
            for turn in range(10**9):
                refitter.add(rows[turn % len(rows)])
                await asyncio.sleep(0.002)

        feed = asyncio.get_running_loop().create_task(traffic())
        for row in rows:
            refitter.add(row)
        late = await lateness(seconds)
        feed.cancel()
        await refitter.close()

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, labels) or 0.0

    done = value("eldrd_refit_seconds_count")
    return {
        **late,
        "refits": done,
        "swapped": value("eldrd_refits_total", outcome="swapped"),
        "refit_ms": value("eldrd_refit_seconds_sum") / done * 1e3 if done else 0.0,
    }


def bench_fit(requests: int, workers: int) -> dict[str, float]:
    """Seconds of a fit, greedy mask and four seedings included."""
    calibration = capture(requests, 0)
    start = perf_counter()
    found = fit(calibration, [f"d{i}" for i in range(workers)])
    return {"seconds": perf_counter() - start, "layers": float(found.layers.size), "rho": found.rho or 0.0}


@click.command()
@click.option("--out", default="out/bench/refit.json", show_default=True, type=click.Path(path_type=Path))
@click.option("--seconds", default=10.0, show_default=True, help="Of each watch of the loop.")
@click.option("--large", is_flag=True, help="Also fit 4,000 requests to 64 workers.")
def main(out: Path, seconds: float, large: bool) -> None:
    """Measure, print a table and write JSON."""
    cluster.warm_up()
    routing.warm_up()
    results: dict[str, dict[str, float]] = {"fit_1000_16": bench_fit(1_000, 16)}
    if large:
        results["fit_4000_64"] = bench_fit(4_000, 64)
    gc.collect()
    # As the daemon does before it is ready.
    logs.configure("error")
    yield_to_loop()
    for requests, workers in ((500, 16), (2_000, 64)):
        calibration, drifted = capture(requests, 1), capture(requests, 2)
        with tempfile.TemporaryDirectory() as folder:
            partition_file.save(fit(calibration, [f"d{i}" for i in range(workers)], layers="all"), Path(folder) / "p")
            partition = replace(partition_file.load(Path(folder) / "p"), requests=requests)
        rows = [Signature("exact", c.reshape(-1), 200, GEOMETRY) for c in drifted.prefill]
        for refits in (False, True):
            name = f"loop_{requests}_{workers}_{'refit' if refits else 'alone'}"
            results[name] = uvloop.run(watch(partition, rows, seconds, refits=refits))
    table = Table("what", "figure", title=f"{GEOMETRY.shape[0]} layers x {GEOMETRY.experts} experts")
    for group, figures in results.items():
        for name, value in figures.items():
            table.add_row(f"{group} {name}", f"{value:,.2f}")
    Console().print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"created": datetime.now(UTC).isoformat(timespec="seconds"), **results}
    out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
