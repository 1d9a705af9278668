"""What holds the event loop beside fit and refit: reloads, hook frames and long sums, `python -m loadgen.bench.loop`.

Size: 48 layers x 128 experts (Qwen3-30B-A3B). The loop is watched as lateness.py says, first without work. Then:

- reload: a whole daemon from the shipped eldrd.toml.example with policy eldr, a partition for 64 decode workers, online refit
  and a listener for hooks, told by SIGHUP to reload 50 ms after it has reloaded; each time a decode worker leaves or joins,
  the capture begins or ends, and tau changes. Nothing listens where its workers should be.
- frames: a hook in another process pushes new blocks, 32 rows a message as eldrd-vllm-hook does: into a full cache, where each
  row evicts another, as fast as the receiver takes them; and into memory that is touched for the first time, 100 MB/s, which
  is 270,000 prompt tokens a second, and as fast as they are taken (flood). A flood is faster than a virtual machine may get
  memory from its host, which can take 5 ms for 2 MiB, so no bar is set for it.
- sum: the first sum of prompts of 512 and of 8,192 blocks (128k tokens), every 20 ms. The first is the only long one: it
  leaves checkpoints, and the next that begins alike starts at one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from eldrd import config, daemon
from eldrd.partitions.refitter import yield_to_loop
from eldrd.signatures import cache as signature_cache
from eldrd.signatures import wire
from eldrd.signatures.cache import SignatureCache
from eldrd.signatures.kernels import STRIDE
from eldrd.signatures.receiver import SignatureReceiver
from eldrd.telemetry import logs
from eldrd.telemetry.metrics import Metrics
from loadgen.bench import frames
from loadgen.bench.frames import GEOMETRY
from loadgen.bench.lateness import lateness
from loadgen.bench.proxies import ROOT
from loadgen.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

Figures = dict[str, float]

BAR_MS: Final = 5.0
SUMS: Final = (512, 8_192)
WITHOUT_BAR: Final = ("alone", "frames_flood")
_WORKERS: Final = tuple(f"d{i}" for i in range(64))
# What eldrd-vllm-hook sends at most (hooks/eldrd_hook/push.py).
_ROWS_A_MESSAGE: Final = 32
_PAUSE_S: Final = _ROWS_A_MESSAGE * GEOMETRY.width / 100e6
_FULL: Final = 64 << 20
_ROOMY: Final = 2 << 30
_FLOOD_S: Final = 3.0
# No engine has computed a prompt sooner after its hook said hello.
_FIRST_S: Final = 0.3
_SUM_EVERY_S: Final = 0.02
_RELOAD_EVERY_S: Final = 0.05
_START_S: Final = 60.0


async def watch(seconds: float, work: Coroutine[Any, Any, None] | None = None) -> Figures:
    """Lateness of the loop while ``work`` goes on; it is cancelled at the end. Raises what it raises."""
    # Of what was measured before: giving back gigabytes takes milliseconds.
    gc.collect()
    task = asyncio.get_running_loop().create_task(work) if work is not None else None
    figures = await lateness(seconds)
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return figures


# -- reload -------------------------------------------------------------------------------------------------------------


def _environment(folder: Path, turn: int) -> dict[str, str]:
    """What is configured beside the example; every other turn without the last worker, with a capture, with another tau."""
    odd = turn % 2
    decode = [{"name": name, "url": f"http://127.0.0.1:{7000 + i}"} for i, name in enumerate(_WORKERS)]
    return {
        "ELDRD_SERVER_LISTEN": f"127.0.0.1:{free_port()}",
        "ELDRD_PREFILL_WORKERS": json.dumps([{"name": "p0", "url": "http://127.0.0.1:6999"}]),
        "ELDRD_DECODE_WORKERS": json.dumps(decode[: len(decode) - odd]),
        "ELDRD_DECODE_POLICY": "eldr",
        "ELDRD_DECODE_TAU": str(0.1 + 0.1 * odd),
        "ELDRD_PARTITIONS_FILE": str(folder / "partition.safetensors"),
        "ELDRD_REFIT_ENABLED": "true",
        "ELDRD_SIGNATURES_LISTEN": "tcp://127.0.0.1:*",
        "ELDRD_CAPTURE_DIR": str(folder / "capture") if odd else "",
        "ELDRD_LOG_LEVEL": "error",
    }


async def _generation(served: daemon.Daemon, running: asyncio.Task[None], at_least: int) -> None:
    """Wait until the daemon has loaded so many configurations. Raises RuntimeError where it does not."""
    end = perf_counter() + _START_S
    while running.done() or served.current().generation < at_least:
        if running.done() or perf_counter() > end:
            raise RuntimeError(f"the daemon does not come to generation {at_least}")
        await asyncio.sleep(0.001)


async def reload(folder: Path, seconds: float) -> Figures:
    """Lateness of a daemon's loop while it reloads."""
    frames.write_partition(frames.prompts(), _WORKERS, folder / "partition.safetensors")
    os.environ.update(_environment(folder, 0))
    path = ROOT / "eldrd.toml.example"
    served = daemon.Daemon(path, config.load(path))
    running = asyncio.get_running_loop().create_task(served.run())
    turn = 0

    async def reloads() -> None:
        nonlocal turn
        while True:
            os.environ.update(_environment(folder, turn + 1))
            os.kill(os.getpid(), signal.SIGHUP)
            await _generation(served, running, turn + 2)
            turn += 1
            await asyncio.sleep(_RELOAD_EVERY_S)

    try:
        await asyncio.sleep(2.0)
        figures = await watch(seconds, reloads())
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    return {**figures, "reloads": float(turn)}


# -- hook frames --------------------------------------------------------------------------------------------------------


def push(port: int, pause_s: float) -> None:
    """A hook that pushes new blocks, a message every ``pause_s`` or as fast as they are taken, until it is ended; runs in a
    process of its own."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 17, (_ROWS_A_MESSAGE, GEOMETRY.width), dtype=np.uint8)
    header = wire.Blocks(v=wire.VERSION, seq=1, n=_ROWS_A_MESSAGE, dtype="u1")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(frames.handshake())
        # The greeting and READY: a message sent before would be taken for a part of the handshake.
        left = 64 + 2
        while left > 0:
            left -= len(connection.recv(left))
        connection.recv(255)
        connection.sendall(frames.hello())
        time.sleep(_FIRST_S)
        with contextlib.suppress(OSError):
            while True:
                hashes = rng.integers(0, 2**64, _ROWS_A_MESSAGE, dtype=np.uint64)
                connection.sendall(frames.message(wire.encode(header, hashes, rows)))
                time.sleep(pause_s)


async def hook_frames(budget: int, seconds: float, pause_s: float = 0.0) -> Figures:
    """Lateness of a receiver's loop while a hook pushes blocks into a cache of this size, a message every ``pause_s``."""
    cache = SignatureCache(budget)
    receiver = SignatureReceiver(cache, Metrics())
    port = int(receiver.start("tcp://127.0.0.1:*").rsplit(":", 1)[1])
    pusher = multiprocessing.get_context("spawn").Process(target=push, args=(port, pause_s), daemon=True)
    pusher.start()
    try:
        end = perf_counter() + _START_S
        # A full cache is one that evicts; any other is watched from the hook's hello on.
        while not (cache.evictions if budget == _FULL else receiver.hooks):
            if perf_counter() > end:
                raise RuntimeError("nothing comes from the hook's process")
            await asyncio.sleep(0.001)
        before, evicted = cache.evictions + len(cache), cache.evictions
        figures = await watch(seconds)
        rows = cache.evictions + len(cache) - before
    finally:
        pusher.kill()
        pusher.join()
        receiver.close()
    mb = rows * GEOMETRY.width / 1e6
    return {**figures, "mb_s": mb / seconds, "rows": float(rows), "evicted": float(cache.evictions - evicted)}


# -- sums ---------------------------------------------------------------------------------------------------------------


def _never_summed(hashes: Any) -> Iterator[Any]:
    """The same rows as other prompts: none has a checkpoint where another has one."""
    for shift in range(1, STRIDE):
        yield np.roll(hashes, shift)


async def sums(blocks: int, seconds: float) -> Figures:
    """Lateness of the loop while prompts of so many blocks are added up for the first time."""
    rng = np.random.default_rng(0)
    cache = SignatureCache(1 << 28)
    cache.reserve(GEOMETRY)
    await asyncio.sleep(_FIRST_S)
    hashes = rng.integers(0, 2**64, blocks, dtype=np.uint64)
    rows = rng.integers(0, 17, (blocks, GEOMETRY.width), dtype=np.uint8)
    cache.insert(GEOMETRY, hashes, rows)
    tail = np.zeros(GEOMETRY.width, np.uint8)
    took: list[float] = []

    async def add_up() -> None:
        for prompt in _never_summed(hashes):
            await asyncio.sleep(_SUM_EVERY_S)
            start = perf_counter()
            _, missing, _ = cache.add_up(GEOMETRY, prompt, tail)
            took.append((perf_counter() - start) * 1e3)
            if missing:
                raise RuntimeError("the prompt is not in the cache")

    figures = await watch(min(seconds, _SUM_EVERY_S * STRIDE), add_up())
    return {**figures, "sums": float(len(took)), "sum_p50_ms": float(np.median(took)), "sum_max_ms": max(took)}


def held_too_long(results: Mapping[str, Figures]) -> list[str]:
    """The works that held the loop for more than BAR_MS, but for those without a bar."""
    return [name for name, f in results.items() if name not in WITHOUT_BAR and f["held_max_ms"] > BAR_MS]


@click.command(context_settings={"show_default": True})
@click.option("--out", default="out/bench/loop.json", type=click.Path(path_type=Path), help="Report to write.")
@click.option("--seconds", default=8.0, type=click.FloatRange(1, 60), help="Of each watch of the loop.")
def main(out: Path, seconds: float) -> None:
    """Measure, print a table and write JSON."""
    # As the daemon does before it is ready.
    logs.configure("error")
    yield_to_loop()
    signature_cache.warm_up()
    gc.collect()
    gc.freeze()
    results: dict[str, Figures] = {"alone": uvloop.run(watch(seconds))}
    with tempfile.TemporaryDirectory() as folder:
        results["reload"] = uvloop.run(reload(Path(folder), seconds))
    results["frames_evicting"] = uvloop.run(hook_frames(_FULL, seconds))
    results["frames_fresh"] = uvloop.run(hook_frames(_ROOMY, seconds, _PAUSE_S))
    results["frames_flood"] = uvloop.run(hook_frames(_ROOMY, min(seconds, _FLOOD_S)))
    for blocks in SUMS:
        results[f"sum_{blocks}"] = uvloop.run(sums(blocks, seconds))
    logs.close()
    columns = ("held_p999_ms", "held_max_ms", "late_p999_ms", "late_max_ms")
    table = Table("work", *columns, "of it", "", title=f"The event loop, held for {BAR_MS:g} ms at most")
    long = held_too_long(results)
    for name, f in results.items():
        rest = ", ".join(f"{key} {f[key]:,.1f}" for key in f if not key.startswith(("held", "late")))
        verdict = "" if name in WITHOUT_BAR else "[red]NOT MET[/]" if name in long else "[green]met[/]"
        table.add_row(name, *(f"{f[c]:,.2f}" for c in columns), rest, verdict)
    Console().print(table)
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "bar_ms": BAR_MS,
        "met": not long,
        **results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
