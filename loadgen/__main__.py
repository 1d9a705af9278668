"""Commands of `python -m loadgen`. Options only; the work is done elsewhere."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click
import uvloop

from loadgen import chaos as chaoses
from loadgen import demo as demos
from loadgen.daemon import DaemonError
from loadgen.fleet import FleetSpec
from loadgen.fleet.emulated import serve
from loadgen.simulate import CELLS


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Load for eldrd."""


@main.command()
@click.option("--prefill", default=2, help="Prefill workers.")
@click.option("--decode", default=4, help="Decode workers.")
@click.option("--plain", default=0, help="Workers that do both.")
@click.option("--hook", default=None, help="eldrd's signatures.listen; without it there are no hooks.")
@click.option("--lease-s", default=30.0, help="How long a prefill worker keeps KV for its decode worker.")
def fleet(prefill: int, decode: int, plain: int, hook: str | None, lease_s: float) -> None:
    """Run emulated vLLM workers until SIGTERM; prints one JSON line with their names and URLs."""
    uvloop.run(serve(FleetSpec(prefill=prefill, decode=decode, plain=plain, hook=hook, lease_s=lease_s)))


@main.command()
@click.option(
    "--out", default=Path("out/demo"), type=click.Path(path_type=Path, file_okay=False), help="Output folder."
)
@click.option("--seconds", default=40.0, help="Length of each measured run.")
@click.option("--rate", default=20.0, help="Requests a second.")
def demo(out: Path, seconds: float, rate: float) -> None:
    """Compare jsq and eldr on the emulated fleet through the real daemon."""
    try:
        sys.exit(uvloop.run(demos.run(demos.Plan(out=out.resolve(), seconds=seconds, rate=rate))))
    except (demos.DemoError, DaemonError) as e:
        raise click.ClickException(str(e)) from None


@main.command("demo-vllm")
@click.option(
    "--out", default=Path("out/demo-vllm"), type=click.Path(path_type=Path, file_okay=False), help="Output folder."
)
@click.option("--requests", default=200, help="Requests of each measured run.")
@click.option("--rate", default=5.0, help="Requests a second.")
def demo_vllm(out: Path, requests: int, rate: float) -> None:
    """Show outputs, signatures and locality on real vLLM servers (in the environment of loadgen/vllm/install.sh)."""
    from loadgen.vllm import demo as real

    sys.exit(asyncio.run(real.run(real.Plan(out=out.resolve(), requests=requests, rate=rate))))


@main.command()
@click.option("--requests", default=10_000, type=click.IntRange(min=2), help="Requests in all.")
@click.option("--seed", default=0, help="Fixes the requests and the faults.")
@click.option("--parallel", default=64, type=click.IntRange(min=1), help="Requests under way at once.")
@click.option(
    "--out", default=Path("out/chaos"), type=click.Path(path_type=Path, file_okay=False), help="Folder of eldrd's log."
)
@click.option("--json", "report", default=None, type=click.Path(path_type=Path, dir_okay=False), help="Report file.")
@click.option("--report-every", default=1000, help="Requests between two progress lines; 0 for none.")
def chaos(requests: int, seed: int, parallel: int, out: Path, report: Path | None, report_every: int) -> None:
    """Random requests, faults and disconnects against a real eldrd; status 1 if anything was wrong."""
    plan = chaoses.Plan(requests, seed, out, parallel, report_every)
    try:
        found = uvloop.run(chaoses.run(plan, click.echo))
    except DaemonError as e:
        raise click.ClickException(str(e)) from None
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(found.json())
    click.echo(found.json())
    for problem in found.problems:
        click.echo(problem, err=True)
    sys.exit(bool(found.problems))


@main.command("prove-vllm")
@click.option(
    "--out", default=Path("out/prove"), type=click.Path(path_type=Path, file_okay=False), help="Output folder."
)
@click.option("--rounds", default=6, help="Rounds; each runs every policy.")
@click.option("--requests", default=48, help="Requests of a policy's run.")
@click.option("--rate", default=3.0, help="Requests a second.")
def prove_vllm(out: Path, rounds: int, requests: int, rate: float) -> None:
    """Compare the policies' TPOT on real vLLM servers with a model that is bound by its expert weights."""
    from loadgen.vllm import prove

    sys.exit(asyncio.run(prove.run(prove.Plan(out.resolve(), rounds=rounds, requests=requests, rate=rate))))


@main.command()
@click.option(
    "--cells", default="quick", type=click.Choice(CELLS), help="Which experiments; paper: all published ones."
)
@click.option("--seeds", default=3, type=click.IntRange(1, 100), help="Repetitions of each with other requests.")
@click.option(
    "--out", default=Path("out/simulate"), type=click.Path(path_type=Path, file_okay=False), help="Output folder."
)
@click.option("--processes", default=0, type=click.IntRange(0, 256), help="0 for one a core.")
@click.option(
    "--capture",
    default=None,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Replay a capture's requests: the partition is fitted to half of them, the others arrive.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of tables.")
def simulate(cells: str, seeds: int, out: Path, processes: int, capture: Path | None, *, as_json: bool) -> None:
    """Compare routing policies in virtual time: tables, and figures and JSON in the output folder."""
    from rich.console import Console

    from loadgen.simulate import command

    console = Console(quiet=as_json, width=None if sys.stdout.isatty() else 200)
    plan = command.Plan(cells, seeds, out, processes, capture)
    content = command.simulate(plan, console, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
