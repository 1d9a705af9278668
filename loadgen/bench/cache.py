"""Times the signature cache as it fills and evicts: `python -m loadgen.bench.cache`. No network, no routing.

Size: 48 layers x 128 experts (Qwen3-30B-A3B), blocks of 16 tokens, 6 KiB a row; prompts of 512 and 8,192 blocks.
"""

from __future__ import annotations

import json
import resource
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from eldrd.signatures.cache import SignatureCache, warm_up
from eldrd.signatures.geometry import Geometry
from eldrd.signatures.kernels import STRIDE

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

GEOMETRY: Final = Geometry("bench", 1, tuple(range(48)), 128, 8, 16)
PROMPT: Final = 512
LONG: Final = 8_192
_RECENT: Final = 20


class Prompts:
    """Prompts of random hashes, with rows out of one pool: what they hold takes no part in the times."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.rows = self._rng.integers(0, 17, (PROMPT, GEOMETRY.width), dtype=np.uint8)

    def insert(self, cache: SignatureCache, blocks: int) -> tuple[NDArray[np.uint64], float]:
        """A new prompt's hashes, inserted as frames of up to PROMPT blocks, and the seconds that took."""
        hashes = self._rng.integers(0, 2**64, blocks, dtype=np.uint64)
        start = perf_counter()
        for at in range(0, blocks, PROMPT):
            piece = hashes[at : at + PROMPT]
            cache.insert(GEOMETRY, piece, self.rows[: piece.size])
        return hashes, perf_counter() - start


def _us(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of the calls."""
    times = []
    for call in calls:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times) * 1e6


def sums(cache: SignatureCache, prompts: list[NDArray[np.uint64]]) -> dict[str, float]:
    """Microseconds of a prompt's sum: the first one, which leaves checkpoints; the next, which ends at one; and the worst
    case of the next, which ends just before one. Wrong if any of it misses a row."""
    out = np.zeros(GEOMETRY.width, np.int32)

    def of(hashes: NDArray[np.uint64]) -> Callable[[], object]:
        def call() -> None:
            if cache.gather(GEOMETRY, hashes, out):
                raise RuntimeError("a recent prompt is not in the cache")

        return call

    return {
        "first_us": _us([of(p) for p in prompts]),
        "cached_us": _us([of(p) for p in prompts]),
        "cached_worst_us": _us([of(p[:-1]) for p in prompts]),
    }


def fill(budget: int, turns: float, report: Callable[[dict[str, float]], None]) -> list[dict[str, float]]:
    """Insert ``turns`` times what the budget holds; every eighth of it, time insertion and the sums of recent prompts."""
    cache, prompts = SignatureCache(budget), Prompts(0)
    points: list[dict[str, float]] = []
    prompts.insert(cache, 1)
    step = max(PROMPT * _RECENT, cache.capacity // 8)
    while len(points) * step < turns * cache.capacity:
        spent, inserted = 0.0, 0
        recent: list[NDArray[np.uint64]] = []
        while inserted < step:
            hashes, seconds = prompts.insert(cache, PROMPT)
            recent = [*recent[-_RECENT + 1 :], hashes]
            spent += seconds
            inserted += PROMPT
        point = {
            "full": len(cache) / cache.capacity,
            "evictions": float(cache.evictions),
            "insert_mb_s": inserted * GEOMETRY.width / spent / 1e6,
            **sums(cache, recent),
            "checkpoints": float(cache.checkpoints),
            "gib": cache.bytes / 2**30,
        }
        points.append(point)
        report(point)
    return points


def long_prompt() -> dict[str, float]:
    """The sums of a prompt of LONG blocks: 128k tokens."""
    cache, prompts = SignatureCache(1 << 28), Prompts(1)
    hashes, _ = prompts.insert(cache, LONG)
    first = sums(cache, [hashes])["first_us"]
    return {"first_us": first, **{k: v for k, v in sums(cache, [hashes] * 50).items() if k != "first_us"}}


@click.command()
@click.option("--out", default="out/bench/cache.json", show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--gib",
    default=1.0,
    show_default=True,
    type=click.FloatRange(1, 64),
    help="Budget of the cache; a smaller one does not hold the recent prompts that are summed.",
)
@click.option("--turns", default=2.0, show_default=True, type=click.FloatRange(0.2, 20), help="Times it is filled.")
def main(out: Path, gib: float, turns: float) -> None:
    """Measure, print a table and write JSON."""
    warm_up()
    columns = ("full", "evictions", "insert_mb_s", "first_us", "cached_us", "cached_worst_us", "checkpoints", "gib")
    table = Table(*columns, title=f"Prompts of {PROMPT} blocks, a checkpoint every {STRIDE}")
    points = fill(int(gib * 2**30), turns, lambda p: table.add_row(*(f"{p[c]:,.2f}" for c in columns)))
    console = Console()
    console.print(table)
    long = long_prompt()
    console.print(f"{LONG} blocks: " + ", ".join(f"{k} {v:,.1f}" for k, v in long.items()))
    content: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "budget_gib": gib,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "points": points,
        "long": long,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
