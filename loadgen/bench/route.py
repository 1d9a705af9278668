"""Times the block cache and a routing decision beside plain NumPy: `python -m loadgen.bench.route`. No network.

Ratios are what lasts over machines. Size: 48 layers x 128 experts (Qwen3-30B-A3B), prompts of 512 blocks.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from eldrd.partitions.file import Partition
from eldrd.routing import build as routing
from eldrd.routing.prefill import PrefixHash
from eldrd.signatures.cache import SignatureCache, warm_up
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

LAYERS: Final = 48
EXPERTS: Final = 128
BLOCKS: Final = 512
GEOMETRY: Final = Geometry("bench", 1, tuple(range(LAYERS)), EXPERTS, 8, 16)


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)


def bench_cache(rng: np.random.Generator, rows: int) -> dict[str, float]:
    """Sum of BLOCKS rows out of ``rows`` and insertion, beside NumPy's gather-and-sum and copy.

    The cold sum draws its rows from all of them (more than the last-level cache holds), the warm one repeats one set.
    """
    hashes = rng.integers(0, 2**64, rows, dtype=np.uint64)
    counts = rng.integers(0, 17, (rows, GEOMETRY.width), dtype=np.uint8)
    cache = SignatureCache(2 * counts.nbytes)
    start = perf_counter()
    cache.insert(GEOMETRY, hashes, counts)
    first = perf_counter() - start
    cache.remove(GEOMETRY, hashes)
    start = perf_counter()
    cache.insert(GEOMETRY, hashes, counts)
    again = perf_counter() - start
    out = np.zeros(GEOMETRY.width, np.int32)
    prompts = [rng.choice(rows, BLOCKS, replace=False) for _ in range(100)]
    turn = iter(prompts * 2)

    def cold() -> None:
        cache.gather(GEOMETRY, hashes[next(turn)], out)

    cold_s = timed(cold, len(prompts))
    plain_s = timed(lambda: counts[next(turn)].sum(axis=0, dtype=np.int32), len(prompts))
    return {
        "insert_first_mb_s": counts.nbytes / first / 1e6,
        "insert_mb_s": counts.nbytes / again / 1e6,
        "sum_cold_us": cold_s * 1e6,
        "sum_warm_us": timed(lambda: cache.gather(GEOMETRY, hashes[:BLOCKS], out), 200) * 1e6,
        "sum_numpy_cold_us": plain_s * 1e6,
        "sum_cold_speedup": plain_s / cold_s,
    }


def random_partition(rng: np.random.Generator, names: tuple[str, ...]) -> Partition:
    """One of all layers, for decisions whose cost does not depend on what is in it."""
    workers = len(names)
    centroids = rng.random((workers, GEOMETRY.width), np.float32)
    return Partition(
        centroids=centroids / np.linalg.norm(centroids, axis=1, keepdims=True),
        idf=rng.random(GEOMETRY.shape, np.float32),
        layers=np.arange(LAYERS, dtype=np.int32),
        workers=names,
        geometry=GEOMETRY,
        tau=0.1,
        requests=workers,
        rho=None,
        cluster_sizes=(1,) * workers,
        created="",
    )


def bench_decision(rng: np.random.Generator, workers: int) -> dict[str, float]:
    """One eldr decision from raw counts, beside its NumPy version."""
    names = tuple(f"d{i}" for i in range(workers))
    partition = random_partition(rng, names)
    policy = routing.build("eldr", partition=partition, workers=names, tau=0.1)
    counts = rng.integers(0, 50, GEOMETRY.width, dtype=np.int32)
    in_flight, usable = rng.integers(0, 40, workers, dtype=np.int32), np.ones(workers, np.bool_)
    weights = partition.idf.reshape(-1)

    def plain(counts: NDArray[np.int32]) -> int:
        x = counts * weights
        scores = partition.centroids @ (x / np.linalg.norm(x))
        return int(np.where(scores >= scores.max() - 0.1, in_flight, 2**30).argmin())

    ours = timed(lambda: policy.choose(in_flight, usable, counts), 2000)
    numpy_s = timed(lambda: plain(counts), 2000)
    return {"us": ours * 1e6, "numpy_us": numpy_s * 1e6, "speedup": numpy_s / ours}


class PlainUnion:
    """Union routing as NumPy says it: sums of logarithms a worker, exponentials when they are read."""

    def __init__(self, workers: int, prior: NDArray[np.float32]) -> None:
        self.sums = np.zeros((workers, GEOMETRY.width), np.float32)
        self.n = np.zeros(workers, np.int32)
        self.prior = prior

    def choose(self, p: NDArray[np.float32]) -> int:
        free = np.exp(self.sums)
        added = free @ p / LAYERS
        active = (1 - free).sum(axis=1) / LAYERS
        lost = 0.2 * added + 0.06
        return int((self.n * lost + 5.5 + 0.2 * active + 0.06 * self.n + lost).argmin())

    def serve(self, counts: NDArray[np.int32], tokens: int) -> None:
        p = np.minimum((counts.reshape(-1) + 8 * self.prior) / np.float32(tokens + 8), np.float32(0.98))
        worker = self.choose(p)
        log = np.log1p(-p)
        self.sums[worker] += log
        self.n[worker] += 1
        self.sums[worker] -= log
        self.n[worker] -= 1


def bench_union(rng: np.random.Generator, name: str, workers: int, ranks: int = 1) -> dict[str, float]:
    """A decision of union, guarded_band or soft_band with admission and end, 32 requests on every worker, beside NumPy's
    union (which has no band); and what learning from the answer adds."""
    names = tuple(f"d{i}" for i in range(workers))
    options = routing.Options(ranks=ranks)
    policy = routing.build(name, partition=random_partition(rng, names), workers=names, tau=0.1, options=options)
    weights = rng.random((64, *GEOMETRY.shape)) ** 8
    tokens = 300
    requests = rng.binomial(tokens, weights / weights.sum(axis=2, keepdims=True) * 8 % 1).astype(np.int32)
    in_flight, usable = np.full(workers, 32, np.int32), np.ones(workers, np.bool_)
    plain = PlainUnion(workers, (requests / tokens).mean(axis=0, dtype=np.float32).reshape(-1))
    for i in range(32 * workers):
        policy.admitted(i % workers, requests[i % 64], tokens, 0.0)
        plain.sums[i % workers] += np.log1p(-np.minimum(requests[i % 64].reshape(-1) / np.float32(tokens), 0.98))
    now = iter(range(1_000_000))

    def ours(tpot_s: float | None = None) -> None:
        counts = requests[next(now) % 64]
        decision = policy.choose(in_flight, usable, counts, tokens)
        policy.ended(policy.admitted(decision.worker, counts, tokens, float(next(now))), float(next(now)), tpot_s)

    us = timed(ours, 2000) * 1e6
    numpy_us = timed(lambda: plain.serve(requests[next(now) % 64], tokens), 200) * 1e6
    learning_us = timed(lambda: ours(0.02), 2000) * 1e6 - us
    return {"us": us, "numpy_us": numpy_us, "speedup": numpy_us / us, "learning_us": learning_us}


def bench_prefill(rng: np.random.Generator, workers: int) -> dict[str, float]:
    """One prefix-hash decision on a prompt of 4 KiB."""
    policy = PrefixHash([f"p{i}" for i in range(workers)])
    prompt = rng.bytes(4096)
    in_flight, usable = np.zeros(workers, np.int32), np.ones(workers, np.bool_)
    return {"us": timed(lambda: policy.choose(prompt, in_flight, usable), 2000) * 1e6}


@click.command()
@click.option("--out", default="out/bench/route.json", show_default=True, type=click.Path(path_type=Path))
@click.option("--rows", default=16_384, show_default=True, type=click.IntRange(BLOCKS), help="Rows in the cache.")
def main(out: Path, rows: int) -> None:
    """Measure, print a table and write JSON."""
    rng = np.random.default_rng(0)
    start = perf_counter()
    warm_up()
    routing.warm_up()
    results: dict[str, dict[str, float]] = {"warm_up": {"seconds": perf_counter() - start}}
    results["cache"] = bench_cache(rng, rows)
    for workers in (16, 64):
        results[f"decision_{workers}"] = bench_decision(rng, workers)
        for name in ("union", "guarded_band", "soft_band"):
            results[f"{name}_{workers}"] = bench_union(rng, name, workers)
    results["union_16_ep_4"] = bench_union(rng, "union", 16, ranks=4)
    results["prefix_hash_8"] = bench_prefill(rng, 8)
    table = Table("what", "figure", title=f"{LAYERS} layers x {EXPERTS} experts, {BLOCKS} blocks a prompt")
    for group, figures in results.items():
        for name, value in figures.items():
            table.add_row(f"{group} {name}", f"{value:,.1f}")
    Console().print(table)
    content: dict[str, Any] = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows, **results}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
