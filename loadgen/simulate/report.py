"""What simulated runs showed: comparisons with confidence intervals, tables, figures. Simulates nothing itself."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.table import Table
from scipy import stats

from loadgen.simulate.cells import LOAD_POLICIES
from loadgen.simulate.scenario import MEASURED_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

Row = dict[str, Any]

# ELDR, arXiv 2607.00466: eldr against the best of random, round robin, jsq and p2c, mean over rates, (median, P99) in %.
PAPER: Final = {
    ("qwen3-30b", "task"): (-13.9, -6.0),
    ("gpt-oss-120b", "task"): (-7.0, -3.4),
    ("gemma-like", "task"): (-9.4, -5.2),
    ("qwen3-30b", "language"): (-10.0, -6.2),
    ("gpt-oss-120b", "language"): (-7.3, 1.5),
    ("gemma-like", "language"): (-5.9, 0.2),
}
# The same paper: Qwen3, task, median TPOT of round robin and of ELDR in ms by rate.
PAPER_RATES: Final = {
    "20/s": (15.2, 13.0),
    "40/s": (18.8, 16.4),
    "60/s": (26.8, 22.6),
    "80/s": (25.5, 23.6),
    "100/s": (25.1, 21.7),
}
METRICS: Final = ("tpot_p50_ms", "tpot_p99_ms", "active_experts")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of its 95 % confidence interval) by Student's t; nan for the width of a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, float("nan")
    return mean, float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))


def changes(rows: Iterable[Row]) -> list[Row]:
    """Each run against the best load balancer of the same model, workload, cell, variant and seed: the relative change
    of each metric, as ``<metric>_change``. Load balancers are compared too: the best of them is at 0."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row["cell"] != "calibration":
            groups[row["model"], row["workload"], row["cell"], row["variant"], row["seed"]].append(row)
    out = []
    for group in groups.values():
        for row in group:
            against = {}
            for metric in METRICS:
                best = min(r[metric] for r in group if r["policy"] in LOAD_POLICIES)
                against[f"{metric}_change"] = row[metric] / best - 1
            out.append({**row, **against})
    return out


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of keys, in order of appearance."""
    out: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        out[tuple(row[k] for k in keys)].append(row)
    return dict(out)


def summary(rows: Sequence[Row]) -> list[Row]:
    """JSON-ready means with intervals of each cell, variant and policy; and over the variants of the cell main."""
    out = []
    compared = changes(rows)
    overall = [{**r, "variant": "all rates"} for r in compared if r["cell"] == "main"]
    keys = ("cell", "model", "workload", "variant", "policy")
    for key, group in grouped([*compared, *overall], *keys).items():
        entry: Row = dict(zip(keys, key, strict=True))
        entry["runs"] = len(group)
        for name in (*METRICS, *(f"{m}_change" for m in METRICS), "imbalance"):
            entry[name], entry[f"{name}_ci"] = interval([r[name] for r in group])
        out.append(entry)
    return out


def worst(rows: Sequence[Row]) -> list[Row]:
    """For every policy that is none of the load balancers, over all cells but sweeps: in how many of them (mean of the
    seeds) its median is the lowest of all policies' within 0.5 %, in how many its P99 is above the best load balancer's
    by over 0.5 %, and the worst of each."""
    cells = grouped([r for r in summary(rows) if r["variant"] != "all rates"], "cell", "model", "workload", "variant")
    found: dict[str, Row] = {}
    for (cell, *_), group in cells.items():
        if cell in ("tau", "kmeans", "transforms"):
            continue
        best = min(r["tpot_p50_ms_change"] for r in group)
        for r in group:
            if r["policy"] in LOAD_POLICIES:
                continue
            entry = found.setdefault(
                r["policy"], {"cells": 0, "median_best": 0, "p99_above": 0, "median_gap": 0.0, "p99_worst": -1.0}
            )
            gap = (1 + r["tpot_p50_ms_change"]) / (1 + best) - 1
            entry["cells"] += 1
            entry["median_best"] += gap <= 0.005
            entry["p99_above"] += r["tpot_p99_ms_change"] > 0.005
            entry["median_gap"] = max(entry["median_gap"], gap)
            entry["p99_worst"] = max(entry["p99_worst"], r["tpot_p99_ms_change"])
    return [{"policy": name, **entry} for name, entry in found.items()]


def _percent(entry: Row, metric: str) -> str:
    value, half = entry[f"{metric}_change"], entry[f"{metric}_change_ci"]
    return f"{value:+.1%}" if np.isnan(half) else f"{value:+.1%} ±{half * 100:.1f}"


def calibration_table(rows: Sequence[Row]) -> Table:
    """The populations' statistics beside the paper's."""
    table = Table("model", "workload", "what", "here", "paper", title="Calibration")
    for (model, workload), group in grouped(
        [r for r in rows if r["cell"] == "calibration"], "model", "workload"
    ).items():
        paper = "17-21 %" if workload == "task" else "3-10 %"
        for batch in group[0]["saving"]:
            here = np.mean([r["saving"][batch] for r in group])
            table.add_row(model, workload, f"fewer experts, one domain, batch {batch}", f"{here:.1%}", paper)
        here = np.mean([r["correlation"] for r in group])
        table.add_row(model, workload, "prefill-decode correlation", f"{here:.2f}", "0.70-0.92")
    mine = {
        (r["variant"], r["policy"]): r
        for r in summary(rows)
        if (r["model"], r["workload"], r["cell"]) == ("qwen3-30b", "task", "main")
    }
    for rate, figures in PAPER_RATES.items():
        for policy, figure in zip(("round_robin", "eldr"), figures, strict=True):
            if entry := mine.get((rate, policy)):
                what = f"{policy} TPOT P50 at {rate}"
                table.add_row("qwen3-30b", "task", what, f"{entry['tpot_p50_ms']:.1f} ms", f"{figure} ms")
    if entry := mine.get(("all rates", "eldr")):
        by_rate = grouped([r for r in changes(rows) if r["cell"] == "main"], "model", "workload", "variant", "seed")
        saved = []
        for (model, workload, _, _), group in by_rate.items():
            if (model, workload) == ("qwen3-30b", "task"):
                active = {r["policy"]: r["active_experts"] for r in group}
                saved.append(active["eldr"] / active["round_robin"] - 1)
        table.add_row("qwen3-30b", "task", "eldr active experts vs round robin", f"{np.mean(saved):+.1%}", "-22.0 %")
    return table


def tables(rows: Sequence[Row]) -> list[Table]:
    """Calibration, then one table a cell: TPOT median / P99 against the best load balancer, then who is best where."""
    out = [calibration_table(rows)]
    entries = summary(rows)
    for (cell,), in_cell in grouped(entries, "cell").items():
        variants = list(dict.fromkeys(r["variant"] for r in in_cell))
        policies = [p for p in dict.fromkeys(r["policy"] for r in in_cell) if p not in LOAD_POLICIES]
        balancers = ", ".join(p for p in LOAD_POLICIES if any(r["policy"] == p for r in in_cell))
        title = f"{cell}: TPOT P50 / P99 against the best of {balancers} (95 % intervals over seeds)"
        table = Table("model, workload", "variant", *policies, title=title)
        for (model, workload), group in grouped(in_cell, "model", "workload").items():
            by = {(r["variant"], r["policy"]): r for r in group}
            for variant in variants:
                cells = [by.get((variant, p)) for p in policies]
                if not any(cells):
                    continue
                values = [f"{_percent(c, 'tpot_p50_ms')}\n{_percent(c, 'tpot_p99_ms')}" if c else "" for c in cells]
                paper = PAPER.get((model, workload)) if variant == "all rates" else None
                note = f"\n(paper, eldr: {paper[0]:+.1f} / {paper[1]:+.1f} %)" if paper else ""
                table.add_row(f"{model}, {workload}", variant + note, *values)
        out.append(table)
    final = Table(
        "policy", "cells", "median lowest", "P99 above", "median worst", "P99 worst", title="Over all cells (±0.5 %)"
    )
    for r in sorted(worst(rows), key=lambda r: (r["p99_above"], -r["median_best"])):
        final.add_row(
            r["policy"],
            str(r["cells"]),
            str(r["median_best"]),
            str(r["p99_above"]),
            f"{r['median_gap']:+.1%}",
            f"{r['p99_worst']:+.1%}",
        )
    return [*out, final]


def figures(rows: Sequence[Row], out: Path) -> list[Path]:
    """One PNG a cell: median and P99 against the best load balancer, a column of panels a model and workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    entries = [r for r in summary(rows) if r["variant"] != "all rates"]
    for (cell,), in_cell in grouped(entries, "cell").items():
        panels = grouped(in_cell, "model", "workload")
        figure, axes = plt.subplots(
            2, len(panels), figsize=(max(6.0, 4.2 * len(panels)), 7), squeeze=False, sharex="col", layout="constrained"
        )
        for column, ((model, workload), group) in enumerate(panels.items()):
            for row, metric in enumerate(("tpot_p50_ms", "tpot_p99_ms")):
                _panel(axes[row][column], group, metric)
            axes[0][column].set_title(f"{model}, {workload}")
        axes[0][0].set_ylabel("TPOT P50, % against\nthe best load balancer")
        axes[1][0].set_ylabel("TPOT P99, % against\nthe best load balancer")
        axes[0][-1].legend(fontsize=7)
        figure.suptitle(f"{cell} (simulated, {MEASURED_S:g} s measured a run, mean and 95 % interval over seeds)")
        paths.append(out / f"{cell}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def _panel(axes: Axes, group: Sequence[Row], metric: str) -> None:
    variants = list(dict.fromkeys(r["variant"] for r in group))
    for (policy,), entries in grouped(group, "policy").items():
        if policy in LOAD_POLICIES and policy != "jsq":
            continue
        by = {r["variant"]: r for r in entries}
        there = [v for v in variants if v in by]
        y = [by[v][f"{metric}_change"] * 100 for v in there]
        error = [by[v][f"{metric}_change_ci"] * 100 for v in there]
        axes.errorbar(
            [variants.index(v) for v in there], y, yerr=error, label=policy, marker="o", ms=3, capsize=2, lw=1
        )
    axes.axhline(0, color="0.6", lw=0.8)
    axes.set_xticks(range(len(variants)), variants, rotation=30, ha="right", fontsize=8)
