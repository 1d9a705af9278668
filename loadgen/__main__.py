"""Commands: `python -m loadgen fleet` and `python -m loadgen demo`. Options only; the work is done elsewhere."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import uvloop

from loadgen import demo as demos
from loadgen.fleet import FleetSpec
from loadgen.fleet.emulated import serve


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
        sys.exit(uvloop.run(demos.run(demos.Plan(out=out, seconds=seconds, rate=rate))))
    except demos.DemoError as e:
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

    sys.exit(asyncio.run(real.run(real.Plan(out=out, requests=requests, rate=rate))))


if __name__ == "__main__":
    main()
