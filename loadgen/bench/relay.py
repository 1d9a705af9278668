"""The relay bench, `python -m loadgen.bench.relay`: what eldrd's data path costs beside other PD proxies, against bars.

A C mock answers as one prefill and two decode servers, a C client loads one proxy at a time (native/). The proxy has core
0, everything else core 1. Proxies are interleaved in random order and medians compared, so that ratios outlast the
machine. eldrd runs from the shipped eldrd.toml.example with its policy eldr, a fitted partition and a pushed signature a
request. CPU is all of the proxy process's, from the first request of a run to its last. No figure is corrected.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

from loadgen.bench.proxies import OTHER_CORE, PEERS, BenchError, Proxy, Stage, build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Figures = dict[str, float]

# Reads a chunk below which chunks came together at the client: such a run flatters the proxy.
_SINGLE: Final = 0.97
# On a busy machine the streams are run again, up to so many times as often, until enough runs are usable.
_PATIENCE: Final = 2


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of load. arguments: the client's; figures: those shown; requests: whether it needs more than a decode
    server; once: measured on the proxy's first load only, when its memory is untouched."""

    arguments: str
    figures: tuple[str, ...]
    requests: bool = True
    once: bool = False


WORKS: Final = {
    "capacity": Work("-c 5000 -n 1 -s -m 20 -i 500000 -r 5000 -T 60", ("rss_kb_stream", "errors"), once=True),
    "stream": Work("-c 1024 -n 1 -s -m 80 -i 25000 -r 400 -T 20", ("us_chunk", "way_p50_us", "single"), requests=False),
    "nonstream": Work("-c 32 -n 40 -T 20", ("us_request", "total_p50_us", "total_p99_us")),
    "firstbyte": Work("-c 64 -n 19 -s -m 2 -R 400 -T 20", ("first_p50_us", "first_p99_us", "us_request")),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """What eldrd has to reach: ``figure`` of a work at most ``limit``, times the peer's where one is named."""

    work: str
    figure: str
    limit: float
    peer: str | None = None

    def judge(self, results: Mapping[str, Mapping[str, Figures]]) -> dict[str, Any] | None:
        """The bar with what was measured and whether it is met; None where something was not measured."""
        work = results.get(self.work, {})
        if "eldrd" not in work or (self.peer is not None and self.peer not in work):
            return None
        ours = work["eldrd"][self.figure]
        theirs = work[self.peer][self.figure] if self.peer is not None else None
        value = ours / theirs if theirs is not None else ours
        met = value <= self.limit
        fields = {"work": self.work, "figure": self.figure, "peer": self.peer, "eldrd": ours, "theirs": theirs}
        return {**fields, "value": value, "limit": self.limit, "met": met}


BARS: Final = (
    Bar("stream", "us_chunk", 0.80, "vllm-router"),
    Bar("stream", "us_chunk", 0.50, "plain-aiohttp"),
    Bar("nonstream", "us_request", 1.10, "vllm-router"),
    Bar("firstbyte", "first_p50_us", 1.20, "vllm-router"),
    Bar("capacity", "rss_kb_stream", 55.0),
    Bar("capacity", "errors", 0.0),
)


def run_load(program: Path, port: int, arguments: str) -> Figures:
    """One run of the client; its figures. Raises BenchError if it did not run."""
    command = ["taskset", "-c", str(OTHER_CORE), str(program), "-P", str(port), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the load client ended with {done.returncode}: {done.stderr.strip()}")
    figures: Figures = json.loads(done.stdout)
    return figures


def measure(program: Path, proxy: Proxy, work: Work) -> Figures:
    """One run against a proxy: the client's figures and what the run cost the proxy."""
    before_kb = proxy.rss_kb()
    peak_kb = before_kb
    over = threading.Event()

    def watch() -> None:
        nonlocal peak_kb
        while not over.wait(0.1):
            peak_kb = max(peak_kb, proxy.rss_kb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    before_us = proxy.cpu_us()
    try:
        figures = run_load(program, proxy.port, work.arguments)
        cpu_us = proxy.cpu_us() - before_us
    finally:
        over.set()
        watcher.join()
    completed, chunks = max(1, figures["completed"]), max(1, figures["chunks"])
    return {
        **figures,
        "us_request": cpu_us / completed,
        "us_chunk": cpu_us / chunks,
        "single": figures["reads"] / chunks,
        "rss_kb_stream": (peak_kb - before_kb) / completed,
    }


def medians(runs: Sequence[Figures], *, streams: bool) -> Figures:
    """Medians over the runs, errors summed; with ``streams``, over those whose chunks came singly if there are any."""
    clean = [r for r in runs if not streams or r["single"] >= _SINGLE] or runs
    result = {key: median(r[key] for r in clean) for key in runs[0]}
    return {**result, "errors": sum(r["errors"] for r in runs), "runs": len(runs), "clean": len(clean)}


def _too_few_clean(runs: Mapping[str, Sequence[Figures]], wanted: int) -> bool:
    """Whether some proxy has fewer than half the wanted runs whose chunks came singly."""
    return any(2 * sum(r["single"] >= _SINGLE for r in of_proxy) < wanted for of_proxy in runs.values())


def run_works(
    program: Path, proxies: Sequence[Proxy], works: Sequence[str], reps: int, console: Console
) -> dict[str, dict[str, Figures]]:
    """Each work on each proxy that can do it: medians by work and proxy."""
    results: dict[str, dict[str, Figures]] = {}
    for name in (w for w in WORKS if w in works):
        work = WORKS[name]
        able = [p for p in proxies if p.requests or not work.requests]
        runs: dict[str, list[Figures]] = defaultdict(list)
        rounds = 1 if work.once else reps
        turn = 0
        while turn < rounds or (name == "stream" and turn < _PATIENCE * rounds and _too_few_clean(runs, rounds)):
            turn += 1
            for proxy in random.sample(able, len(able)):
                runs[proxy.name].append(measure(program, proxy, work))
                # Closed connections and freed memory settle before the next run.
                time.sleep(0.3)
            console.print(f"{name}: {turn}/{max(turn, rounds)}", highlight=False)
        results[name] = {p.name: medians(runs[p.name], streams=name == "stream") for p in able}
    return results


def exact_share(proxy: Proxy) -> float:
    """Share of eldrd's decisions that had an exact signature, from its metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    states = {
        s: float(n) for s, n in re.findall(r'^eldrd_signatures_total\{state="(\w+)"\} (\S+)$', text, re.MULTILINE)
    }
    return states.get("exact", 0.0) / max(1.0, sum(states.values()))


def show(console: Console, results: Mapping[str, Mapping[str, Figures]], bars: Sequence[dict[str, Any]]) -> None:
    """Print every work's figures and the bars."""
    for name, by_proxy in results.items():
        table = Table("proxy", *WORKS[name].figures, "runs (clean)", title=f"{name}: load {WORKS[name].arguments}")
        for proxy, f in by_proxy.items():
            shown = [f"{f[key]:,.2f}" for key in WORKS[name].figures]
            table.add_row(proxy, *shown, f"{f['runs']:.0f} ({f['clean']:.0f})")
        console.print(table)
    table = Table("bar", "eldrd", "peer", "value", "limit", "", title="Bars")
    for b in bars:
        label = f"{b['work']} {b['figure']}" + (f" / {b['peer']}" if b["peer"] else "")
        theirs = f"{b['theirs']:,.1f}" if b["theirs"] is not None else ""
        verdict = "[green]met[/]" if b["met"] else "[red]NOT MET[/]"
        table.add_row(label, f"{b['eldrd']:,.1f}", theirs, f"{b['value']:,.2f}", f"{b['limit']:g}", verdict)
    console.print(table)


@click.command(context_settings={"show_default": True})
@click.option("--out", default="out/bench/relay.json", type=click.Path(path_type=Path), help="Report to write.")
@click.option("--folder", default=".bench", type=click.Path(path_type=Path), help="Programs, peers and logs.")
@click.option("--works", default=",".join(WORKS), help="Which loads, separated by commas.")
@click.option("--proxies", default=",".join(PEERS), help="Which proxies, separated by commas.")
@click.option("--reps", default=5, type=click.IntRange(1), help="Runs of each load on each proxy.")
def main(out: Path, folder: Path, works: str, proxies: str, reps: int) -> None:
    """Measure eldrd's relay beside its peers, print tables and write JSON."""
    # So that what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    folder = folder.resolve()
    names = proxies.split(",")
    if unknown := set(works.split(",")) - set(WORKS):
        raise click.BadParameter(f"unknown work {', '.join(sorted(unknown))}")
    try:
        build(folder, peers="vllm-router" in names)
        with Stage(folder) as stage:
            started = [stage.start(name) for name in names]
            os.sched_setaffinity(0, {OTHER_CORE})
            results = run_works(folder / "load", started, works.split(","), reps, console)
            shares = [exact_share(p) for p in started if p.name == "eldrd"]
    except BenchError as e:
        raise click.ClickException(str(e)) from None
    bars = [judged for bar in BARS if (judged := bar.judge(results)) is not None]
    show(console, results, bars)
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "eldrd_exact_signatures": shares[0] if shares else None,
        "bars": bars,
        "works": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
