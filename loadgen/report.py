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


def table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """The figures of each policy as a row."""
    out = Table(title="TTFT and TPOT in ms; active experts a layer and decode step")
    for name in ("policy", "TTFT P50", "TPOT P50", "TPOT P95", "TPOT P99", "active experts", "batch"):
        out.add_column(name, justify="left" if name == "policy" else "right")
    out.add_column("requests a worker")
    out.add_column("errors", justify="right")
    for policy, f in figures.items():
        numbers = [
            f"{f[k]:.1f}"
            for k in ("ttft_p50_ms", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms", "active_experts", "batch")
        ]
        workers = " ".join(f"{w}:{n}" for w, n in f["requests"].items())
        out.add_row(policy, *numbers, workers, str(f["errors"]))
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
