"""The command line: serve, check, fit, inspect, status. Parses arguments and prints; the work is done elsewhere."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import click

from eldrd import __version__, config, files
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

    # A stream takes two sockets, and shells allow 1,024 for the sake of programs that use select().
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != most:
        # The service's sandbox refuses it: there, LimitNOFILE says.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.exit(daemon.serve(path))


@main.command()
@_CONFIG
def check(path: Path) -> None:
    """Check the settings, and the files and folders that they name, without starting."""
    try:
        settings = config.load(path)
        files.writable(path, settings)
        files.partition(path, settings, None, None)
        for key in ("client_keys_file", "worker_key_file"):
            config.keys(getattr(settings.auth, key), f"auth.{key}")
        files.ranks(path, settings)
    except config.ConfigError as e:
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
@click.option(
    "--layers",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "greedy", "all"]),
    help="Layers whose experts count: those that greedily raise rho, or all; auto: greedy with decode counts, else all.",
)
@click.option("--restarts", default=4, show_default=True, type=click.IntRange(1, 100), help="Seedings tried.")
@click.option("--seed", default=0, show_default=True, help="Same capture and seed, same partition.")
@click.option(
    "--previous",
    type=click.Path(path_type=Path),
    help="Partition file in use: clusters go to its workers so that few requests move. May be --out itself.",
)
@click.option(
    "--ep-ranks",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="Expert-parallel ranks of a worker: also write which expert goes to which rank.",
)
@click.option(
    "--report", "folder", type=click.Path(path_type=Path, file_okay=False), help="Write report.json and .png."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def fit(
    capture_path: Path,
    workers: str,
    out: Path,
    tau: float,
    layers: Any,
    restarts: int,
    seed: int,
    previous: Path | None,
    ep_ranks: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Fit one centroid per decode worker to a capture and write the partition file."""
    try:
        from eldrd import tables
        from eldrd.partitions import figures, quality
        from eldrd.partitions.fit import FitError
        from eldrd.partitions.fit import fit as fit_partition
        from eldrd.partitions.study import study
    except ImportError as e:
        _fail(f"{e.name} is missing: install eldrd with its extra `fit`", 1)
    from eldrd.signatures.capture import CaptureError, load_capture

    names = [n.strip() for n in workers.split(",") if n.strip()]
    try:
        capture = load_capture(capture_path)
        old = None if previous is None else partition_file.load(previous)
        started = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            partition = fit_partition(
                capture,
                names,
                tau=tau,
                seed=seed,
                restarts=restarts,
                layers=layers,
                previous=old,
                ep_ranks=ep_ranks,
            )
        seconds = time.perf_counter() - started
        partition_file.save(partition, out)
        result = study(partition, capture, seed) if folder else quality.report(partition, capture)
        result["fit_s"] = round(seconds, 3)
        result["moved"] = None if old is None else quality.moved(old, partition, capture.prefill)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "report.json").write_text(json.dumps(result, indent=2) + "\n")
            figures.draw(result, folder / "report.png")
    except (CaptureError, FitError, partition_file.PartitionError, OSError) as e:
        _fail(str(e), 2)
    for warning in said:
        click.echo(f"eldrd: {warning.message}", err=True)
    if layers == "auto" and capture.decode is None:
        click.echo("eldrd: no decode counts in the capture: all layers are used", err=True)
    if as_json:
        click.echo(json.dumps(result))
    else:
        tables.fitted(str(out), partition, result)


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
            "expert-parallel ranks": "no placement" if p.placement is None else p.placement.ranks,
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
