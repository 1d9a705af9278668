"""Draws what study.py found. Reads its numbers only: no captures, no partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


def draw(study: dict[str, Any], path: Path) -> None:
    """One PNG of the panels that the study has numbers for."""
    panels = [_sizes, _similarity, _active]
    if study["transforms"]:
        panels += [_transforms, _layers, _correlation]
    rows = len(panels) // 3
    figure = Figure(figsize=(15, 4.2 * rows), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(rows, 3).flat, strict=True):
        panel(study, axes)
    figure.suptitle(f"{study['requests']} requests, {len(study['cluster_sizes'])} workers")
    figure.savefig(path, dpi=110)


def _sizes(study: dict[str, Any], axes: Axes) -> None:
    workers, at = list(study["cluster_sizes"]), range(len(study["cluster_sizes"]))
    axes.bar([x - 0.2 for x in at], list(study["fit_sizes"].values()), 0.4, label="clustered")
    axes.bar([x + 0.2 for x in at], list(study["cluster_sizes"].values()), 0.4, label="nearest")
    axes.set_xticks(list(at), workers, rotation=90 if len(workers) > 8 else 0)
    axes.set(title="Requests a worker", ylabel="requests")
    axes.legend()


def _similarity(study: dict[str, Any], axes: Axes) -> None:
    s = study["similarity"]
    for name, label in (("own", "nearest centroid"), ("second", "second nearest")):
        if s[name] is not None:
            axes.stairs(s[name], s["edges"], fill=True, alpha=0.5, label=label)
    axes.set(title="Similarity of requests", xlabel="cosine", ylabel="requests")
    axes.legend()


def _active(study: dict[str, Any], axes: Axes) -> None:
    a = study["active"]
    bars = axes.bar(["one cluster", "mixed"], [a["same"], a["mixed"]])
    axes.bar_label(bars, fmt="%.1f")
    axes.margins(y=0.1)
    axes.set(title=f"Active experts, batch {a['batch']} ({a['counts']})", ylabel="distinct experts a layer")


def _transforms(study: dict[str, Any], axes: Axes) -> None:
    known = {name: rho for name, rho in study["transforms"].items() if rho is not None}
    bars = axes.barh(list(known), list(known.values()))
    axes.bar_label(bars, fmt="%.3f")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set(title="Transforms of the counts, all layers", xlabel="rho")


def _layers(study: dict[str, Any], axes: Axes) -> None:
    t = study["rho_by_layers"]
    axes.plot(range(1, len(t["rho"]) + 1), t["rho"])
    axes.axvline(t["peak"], linestyle=":", label=f"peak: {t['peak']} layers")
    axes.set(title="rho by number of layers", xlabel="layers, best first", ylabel="rho")
    axes.legend()


def _correlation(study: dict[str, Any], axes: Axes) -> None:
    c = study["correlation"]
    axes.stairs(c["histogram"], c["edges"], fill=True)
    axes.set(title="Prefill and decode, expert by expert", xlabel="correlation over requests", ylabel="experts")
