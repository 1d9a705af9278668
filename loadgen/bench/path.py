"""The signature path end to end, `python -m loadgen.bench.path`: from the hook's frame to eldrd's decision, in eldrd's own
words. Compares with no peer.

eldrd runs as in the relay bench: the shipped eldrd.toml.example with policy eldr and a fitted partition, a process of its
own on core 0. The C mock on core 1 pushes a request's frame (18 block hashes and the counts of a 12-token tail: 300 tokens,
48 layers x 128 experts; the blocks' rows are in the cache) and writes P's answer right behind it. So the frame is at eldrd
before the answer, and which of the two eldrd reads first is the loop's choice. 100 requests a second are due at fixed times
and streamed, 16 tokens 5 ms apart, so that every decision is made among some eight streams that are relayed.

From eldrd's request log, in ms: ``decide`` is from P's answer to the decision, with the sum of the rows where the frame is
read behind the answer; ``path`` is from the client's request to the decision. In that lie the way to P and P's own time, and
all of the path: reading the frame, summing the rows, waking the request, scoring. As the frame comes later than the request,
``path`` is never less than frame received -> decision: the bar is held to it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from loadgen.bench.proxies import OTHER_CORE, BenchError, Stage, build
from loadgen.bench.relay import run_load

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS: Final = 18
TAIL: Final = 12
RATE: Final = 100
BAR_MS: Final = 1.0
_CONNECTIONS: Final = 50
_LOG_S: Final = 5.0


def requests(log: bytes) -> list[dict[str, Any]]:
    """The lines of requests in eldrd's log; a last line that is not whole yet is left out."""
    lines = log[: log.rfind(b"\n") + 1].splitlines()
    return [line for line in map(orjson.loads, lines) if line["event"] == "request"]


def figures(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Quantiles in ms over requests that were decided, and the share of all that had an exact signature."""
    decided = [line for line in lines if line["decide_ms"] is not None]
    if not decided:
        raise BenchError("no request was decided")
    decide = np.array([line["decide_ms"] for line in decided])
    path = decide + np.array([line["prefill_ms"] for line in decided])
    result = {"requests": float(len(lines)), "undecided": float(len(lines) - len(decided))}
    for name, ms in (("decide", decide), ("path", path)):
        p50, p99 = np.quantile(ms, (0.5, 0.99)).tolist()
        result |= {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99, f"{name}_max_ms": float(ms.max())}
    return {**result, "exact": sum(line["signature"] == "exact" for line in lines) / len(lines)}


def met(result: dict[str, float]) -> bool:
    """Whether half of the decisions took BAR_MS or less, all of them with the whole path in them."""
    return result["path_p50_ms"] <= BAR_MS and result["exact"] == 1.0 and not result["undecided"]


def _read(log: Path, at: int, expected: int) -> list[dict[str, Any]]:
    """The requests logged from byte ``at`` on, once there are as many as expected. Raises BenchError."""
    end = time.monotonic() + _LOG_S
    while len(lines := requests(log.read_bytes()[at:])) < expected:
        if time.monotonic() > end:
            raise BenchError(f"{len(lines)} of {expected} requests are in {log}")
        time.sleep(0.1)
    return lines


@click.command(context_settings={"show_default": True})
@click.option("--out", default="out/bench/path.json", type=click.Path(path_type=Path), help="Report to write.")
@click.option("--folder", default=".bench/path", type=click.Path(path_type=Path), help="Programs and logs.")
@click.option("--seconds", default=15, type=click.IntRange(1, 600), help="Of load.")
def main(out: Path, folder: Path, seconds: int) -> None:
    """Measure, print a table and write JSON."""
    # So that what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = folder.resolve()
    each = max(1, RATE * seconds // _CONNECTIONS)
    arguments = f"-c {_CONNECTIONS} -n {each} -s -m 16 -i 5000 -R {RATE} -T {seconds + 10}"
    try:
        build(folder, peers=False)
        with Stage(folder, BLOCKS, TAIL) as stage:
            proxy = stage.start("eldrd")
            os.sched_setaffinity(0, {OTHER_CORE})
            log = folder / "eldrd.log"
            # The line of the request that waited for the start.
            _read(log, 0, 1)
            before, cpu_us = log.stat().st_size, proxy.cpu_us()
            load = run_load(folder / "load", proxy.port, arguments)
            cpu_us = proxy.cpu_us() - cpu_us
            result = figures(_read(log, before, _CONNECTIONS * each))
    except BenchError as e:
        raise click.ClickException(str(e)) from None
    result |= {"errors": load["errors"], "cpu_ms_request": cpu_us / 1e3 / result["requests"]}
    table = Table("what", "figure", title=f"{RATE} requests/s, {BLOCKS} blocks of 16 and {TAIL} tokens")
    for name, value in result.items():
        table.add_row(name, f"{value:,.3f}")
    verdict = "[green]met[/]" if met(result) else "[red]NOT MET[/]"
    table.add_row(f"path_p50_ms <= {BAR_MS:g}, all exact", verdict)
    Console().print(table)
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": arguments,
        "bar_ms": BAR_MS,
        "met": met(result),
        **result,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
