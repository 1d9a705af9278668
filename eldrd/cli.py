"""The command line: serve, check, fit, inspect, status. Parses arguments and prints; the work is done elsewhere."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from eldrd import __version__, config
from eldrd.partitions import file as partition_file

_CONFIG = click.option(
    "--config", "path", type=click.Path(path_type=Path), default=Path("eldrd.toml"), show_default=True, help="Settings."
)


@click.group()
@click.version_option(__version__, prog_name="eldrd")
def main() -> None:
    """Expert-locality-aware decode router for prefill/decode-disaggregated MoE serving on vLLM."""


@main.command()
@_CONFIG
def serve(path: Path) -> None:
    """Run the daemon. SIGHUP reloads the settings, SIGTERM drains and stops."""
    from eldrd import daemon

    sys.exit(daemon.serve(path))


@main.command()
@_CONFIG
def check(path: Path) -> None:
    """Check the settings, and the partition file they name, without starting."""
    try:
        settings = config.load(path)
        if settings.partitions.file:
            partition = partition_file.load(Path(settings.partitions.file))
            problems = partition_file.mismatches(partition, [w.name for w in settings.decode.workers], None)
            if problems:
                raise config.ConfigError("\n".join(f"{path}: partitions.file: {p}" for p in problems))
    except (config.ConfigError, partition_file.PartitionError) as e:
        _fail(str(e), 2)
    click.echo(
        f"{path}: ok: {len(settings.prefill.workers)} prefill and {len(settings.decode.workers)} decode workers, "
        f"policy {settings.decode.policy}, listening on {settings.server.listen}"
    )


@main.command()
@click.option("--capture", "capture_path", required=True, type=click.Path(path_type=Path), help="Capture directory.")
@click.option("--workers", required=True, help="Decode workers' names, separated by commas.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Partition file to write.")
@click.option("--tau", default=0.1, show_default=True, type=click.FloatRange(0, 2), help="Width of the locality band.")
@click.option("--layers", default="all", show_default=True, type=click.Choice(["all", "greedy"]), help="Layer mask.")
@click.option("--restarts", default=4, show_default=True, type=click.IntRange(1, 100), help="Seedings tried.")
@click.option("--seed", default=0, show_default=True, help="Same capture and seed, same partition.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def fit(
    capture_path: Path, workers: str, out: Path, tau: float, layers: Any, restarts: int, seed: int, as_json: bool
) -> None:
    """Fit one centroid per decode worker to a capture and write the partition file."""
    try:
        from eldrd.partitions.fit import FitError
        from eldrd.partitions.fit import fit as fit_partition
        from eldrd.partitions.quality import report
    except ImportError as e:
        _fail(f"{e.name} is missing: install eldrd with its extra `fit`", 1)
    from eldrd.signatures.capture import CaptureError, load_capture

    names = [n.strip() for n in workers.split(",") if n.strip()]
    try:
        capture = load_capture(capture_path)
        partition = fit_partition(capture, names, tau=tau, seed=seed, restarts=restarts, layers=layers)
        partition_file.save(partition, out)
    except (CaptureError, FitError, partition_file.PartitionError, OSError) as e:
        _fail(str(e), 2)
    result = report(partition, capture)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _table(f"{out}: {result['requests']} requests, {len(names)} workers", result)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def inspect(file: Path) -> None:
    """Show what a partition file holds."""
    try:
        p = partition_file.load(file)
    except partition_file.PartitionError as e:
        _fail(str(e), 2)
    _table(
        str(file),
        {
            "model": p.geometry.model,
            "fingerprint": f"{p.fingerprint:016x}",
            "MoE layers x experts": f"{p.geometry.shape[0]} x {p.geometry.experts}, top-{p.geometry.top_k}",
            "layers used": len(p.layers),
            "tau": p.tau,
            "requests": p.requests,
            "rho": p.rho,
            "created": p.created,
            "workers": dict(zip(p.workers, p.cluster_sizes, strict=True)),
        },
    )


@main.command()
@click.option("--url", default="http://127.0.0.1:8100", show_default=True, help="A running eldrd.")
def status(url: str) -> None:
    """Show the state of a running eldrd."""
    if not url.startswith(("http://", "https://")):
        _fail(f"{url}: must be http://host:port", 2)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/admin/status", timeout=5) as answer:  # noqa: S310, checked above
            click.echo(json.dumps(json.load(answer), indent=2))
    except (urllib.error.URLError, OSError, ValueError) as e:
        _fail(f"{url}: {e}", 1)


def _table(title: str, values: dict[str, Any]) -> None:
    click.echo(title)
    width = max(len(k) for k in values)
    for key, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, float):
            value = round(value, 4)
        click.echo(f"  {key.ljust(width)}  {value}")


def _fail(message: str, code: int) -> Any:
    click.echo(f"eldrd: {message}", err=True)
    sys.exit(code)
