"""Tables of what a fit found, on the terminal. Prints only; computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from eldrd.partitions.file import Partition


def fitted(title: str, partition: Partition, result: dict[str, Any]) -> None:
    """The summary of a fit, its workers, and what a study adds. result: quality.report's or study's, with fit_s, moved."""
    console = Console()
    summary = Table("what", "figure", title=title)
    rows = {
        "requests": result["requests"],
        "layers used": f"{result['layers']} of {result['layers_total']}",
        "rho, signatures and decode": result["rho"],
        "cosine to the nearest centroid": result["own"],
        "cosine to the second nearest": result["second"],
        f"workers within tau = {partition.tau}": result["in_band"],
        "largest cluster over the mean": result["imbalance"],
        "label purity": result["purity"],
        "requests moved": result["moved"],
        "seconds": result["fit_s"],
    }
    if (placed := partition.placement) is not None:
        rows[f"most loaded of {placed.ranks} ranks over the mean, consecutive experts"] = placed.balance_before
        rows["the same, experts placed"] = placed.balance_after
    _add(summary, rows)
    console.print(summary)
    workers = Table("worker", "clustered", "nearest", "labels")
    for name, clustered in result["fit_sizes"].items():
        labels = ", ".join(f"{label} {n}" for label, n in result["labels"][name].items())
        workers.add_row(name, str(clustered), str(result["cluster_sizes"][name]), labels)
    console.print(workers)
    if "active" in result:
        _studied(console, result)


def _studied(console: Console, result: dict[str, Any]) -> None:
    a = result["active"]
    study = Table("what", "figure", title="Study")
    if result["transforms"]:
        _add(study, {f"rho of {name}, all layers": rho for name, rho in result["transforms"].items()})
        trace, c = result["rho_by_layers"], result["correlation"]
        _add(study, {f"rho of the {trace['peak']} best layers": trace["rho"][trace["peak"] - 1]})
        _add(study, {f"prefill-decode correlation, mean of {c['experts']} experts": c["mean"]})
    batch = f"{a['counts']} counts, batch {a['batch']}"
    _add(study, {f"active experts a layer, one cluster ({batch})": a["same"], "the same, mixed": a["mixed"]})
    console.print(study)


def _add(table: Table, rows: dict[str, Any]) -> None:
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
