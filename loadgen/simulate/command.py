"""Runs the experiments in processes and writes tables, figures and JSON. Options come from `python -m loadgen simulate`."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eldrd.routing.build import warm_up
from loadgen.simulate.cells import plan, replay, run
from loadgen.simulate.report import figures, summary, tables, worst
from loadgen.simulate.scenario import MIXES, QWEN, SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.console import Console

    from loadgen.simulate.cells import Unit


@dataclass(frozen=True, slots=True)
class Plan:
    """cells: see loadgen.simulate.CELLS; processes: 0 for one a core; capture: replay its requests instead."""

    cells: str
    seeds: int
    out: Path
    processes: int = 0
    capture: Path | None = None


def simulate(plan_: Plan, console: Console, progress: Callable[[str], None]) -> dict[str, Any]:
    """Simulate, print, draw, and write ``<out>/<cells>.json`` (replay.json for a capture); the content of the JSON."""
    started = perf_counter()
    units = replay(plan_.capture, QWEN, plan_.seeds) if plan_.capture else plan(plan_.cells, plan_.seeds)
    name = "replay" if plan_.capture else plan_.cells
    # Compiled once here, the processes find the kernels in Numba's cache on disk.
    warm_up()
    processes = min(plan_.processes or os.cpu_count() or 1, len(units))
    rows: list[dict[str, Any]] = []
    for done, found in enumerate(_results(units, processes), 1):
        rows += found
        where = f"{found[-1]['model']}, {found[-1]['workload']}, seed {found[-1]['seed']}"
        progress(f"{done}/{len(units)} {where} ({perf_counter() - started:.0f} s)")
    for table in tables(rows):
        console.print(table)
    drawn = figures(rows, plan_.out)
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "cells": name,
        "seconds": round(perf_counter() - started, 1),
        "models": [asdict(s) for s in SHAPES],
        "workloads": [asdict(m) for m in MIXES],
        "summary": summary(rows),
        "over_all_cells": worst(rows),
        "figures": [str(path) for path in drawn],
        "runs": rows,
    }
    plan_.out.mkdir(parents=True, exist_ok=True)
    (plan_.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def _results(units: list[Unit], processes: int) -> Iterator[list[dict[str, Any]]]:
    if processes == 1:
        yield from map(run, units)
        return
    # A process is one core's work; BLAS reads these as the processes start.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    # Spawned: a fork would share the thread pools of the numerical libraries.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(run, units)
