"""What a run showed: figures, table, plot and JSON. Measures nothing itself."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from loadgen.client import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from loadgen.client import Result


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's measured run. results: of all requests; measured: those whose latency counts (sent after the
    warm-up); steps: the decode steps of the same window over all workers, each (batch, active experts a layer)."""

    results: Sequence[Result]
    measured: Sequence[Result]
    steps: Sequence[tuple[int, float]]

    def figures(self) -> dict[str, Any]:
        """The run's entry of report.json: milliseconds, counts, and experts a layer."""
        ok = [r for r in self.measured if r.ok]
        ttft, tpot = [r.ttft * 1e3 for r in ok], [r.tpot * 1e3 for r in ok]
        gaps = [g * 1e3 for r in ok for g in r.gaps]
        batch, active = np.array(self.steps).T if self.steps else np.full((2, 1), np.nan)
        return {
            "ttft_p50_ms": round(percentile(ttft, 50), 2),
            "ttft_p99_ms": round(percentile(ttft, 99), 2),
            "tpot_p50_ms": round(percentile(tpot, 50), 3),
            "tpot_p95_ms": round(percentile(tpot, 95), 3),
            "tpot_p99_ms": round(percentile(tpot, 99), 3),
            "itl_p99_ms": round(percentile(gaps, 99), 3),
            "active_experts": round(float(active.mean()), 2),
            "active_experts_by_token": round(float((active * batch).sum() / batch.sum()), 2),
            "batch": round(float(batch.mean()), 2),
            "requests": dict(sorted(Counter(r.worker or "unknown" for r in self.results).items())),
            "measured": len(ok),
            "errors": sum(not r.ok for r in self.results),
            "outcomes": dict(Counter(r.outcome for r in self.results)),
            "late_p99_ms": round(percentile([r.late * 1e3 for r in self.results], 99), 2),
        }


def change(figures: Mapping[str, Mapping[str, Any]], key: str, of: str, against: str) -> float:
    """Relative change of a figure of one policy against another: -0.2 is 20 % less."""
    return round(float(figures[of][key] / figures[against][key] - 1), 4)


_ROWS = (
    ("TTFT P50, ms", "ttft_p50_ms"),
    ("TPOT P50, ms", "tpot_p50_ms"),
    ("TPOT P95, ms", "tpot_p95_ms"),
    ("TPOT P99, ms", "tpot_p99_ms"),
    ("active experts a step", "active_experts"),
    ("active experts a token", "active_experts_by_token"),
    ("requests in the batch", "batch"),
)


def table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """A column each policy, and how far each later one is from the first. Active experts are the mean over layers."""
    first, *others = figures
    out = Table("", *figures, *(f"{p} / {first}" for p in others))
    for column in out.columns[1:]:
        column.justify = "right"
    for text, key in _ROWS:
        changes = [f"{change(figures, key, p, first):+.1%}" for p in others]
        out.add_row(text, *(f"{f[key]:.1f}" for f in figures.values()), *changes)
    workers = sorted({w for f in figures.values() for w in f["requests"]})
    for w in workers:
        out.add_row(f"requests to {w}", *(str(f["requests"].get(w, 0)) for f in figures.values()))
    out.add_row("failed requests", *(str(f["errors"]) for f in figures.values()))
    return out


def plot(runs: Mapping[str, Run], path: Path) -> None:
    """PNG: the distribution of TPOT over requests and of active experts over decode steps, a line each policy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, run in runs.items():
        tpot = np.sort([r.tpot * 1e3 for r in run.measured if r.ok])
        left.plot(tpot, np.linspace(0, 1, len(tpot)), label=name)
        batch, active = np.array(run.steps).T
        middle.plot(np.sort(active), np.linspace(0, 1, len(active)), label=name)
        sizes = np.unique(batch)
        right.plot(sizes, [np.mean(active[batch == n]) for n in sizes], ".", label=name)
    for axes, x, y in (
        (left, "TPOT of a request, ms", "share of requests"),
        (middle, "active experts a layer and step", "share of decode steps"),
        (right, "requests in the batch", "active experts a layer, mean"),
    ):
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_json(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
