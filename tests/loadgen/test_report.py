"""Figures, table and plot of a run."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from loadgen import report
from loadgen.client import Result


def run(scale: float, failed: int = 0) -> report.Run:
    tpot = np.arange(1, 101) * scale
    results = [
        Result(
            at=float(i), domain=0, outcome="ok", ttft=0.05, tpot=t / 1e3, tokens=10, worker=f"d{i % 2}", gaps=[t / 1e3]
        )
        for i, t in enumerate(tpot)
    ]
    results += [Result(at=0.0, domain=0, outcome="http_503") for _ in range(failed)]
    return report.Run(results, results, [(1, 10.0 * scale), (3, 30.0 * scale)])


def test_figures():
    f = run(1.0, failed=2).figures()
    assert f["tpot_p50_ms"] == pytest.approx(50.5)
    assert f["tpot_p99_ms"] == pytest.approx(np.percentile(np.arange(1, 101), 99), abs=0.01)
    assert f["ttft_p50_ms"] == 50.0
    assert f["active_experts"] == 20.0
    assert f["active_experts_by_token"] == 25.0
    assert f["batch"] == 2.0
    assert f["requests"] == {"d0": 50, "d1": 50, "unknown": 2}
    assert f["errors"] == 2
    assert f["measured"] == 100
    assert f["outcomes"] == {"ok": 100, "http_503": 2}


def test_only_the_window_is_measured():
    whole = run(1.0)
    assert report.Run(whole.results, whole.results[50:], whole.steps).figures()["tpot_p50_ms"] == pytest.approx(75.5)


def test_change_table_and_plot(tmp_path):
    runs = {"jsq": run(1.0), "eldr": run(0.8)}
    figures = {name: r.figures() for name, r in runs.items()}
    assert report.change(figures, "tpot_p50_ms", "eldr", "jsq") == pytest.approx(-0.2)
    console = Console(file=io.StringIO(), width=80)
    console.print(report.table(figures))
    text = console.file.getvalue()
    assert "-20.0%" in text
    assert "requests to d1" in text
    report.plot(runs, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
