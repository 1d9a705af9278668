"""How late an event loop's timers fire: for benches that ask what holds the loop. Does no work of its own.

A timer should fire every millisecond: what it is late by is what any request would have waited. ``held`` leaves out what the
loop's thread waited for a core of a busy machine (schedstat's run-queue time). A watch without work tells what is left of
the machine's own doing.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

_TICK_S: Final = 0.001


async def lateness(seconds: float) -> dict[str, float]:
    """How late a timer of _TICK_S fires, in milliseconds."""
    late, held, end = [], [], perf_counter() + seconds
    with Path("/proc/thread-self/schedstat").open("rb", buffering=0) as schedstat:  # noqa: ASYNC230, no disk

        def queued() -> float:
            return int(os.pread(schedstat.fileno(), 100, 0).split()[1]) / 1e9

        while (before := perf_counter()) < end:
            waited = queued()
            await asyncio.sleep(_TICK_S)
            late.append((perf_counter() - before - _TICK_S) * 1e3)
            held.append(late[-1] - (queued() - waited) * 1e3)
    return {**_tail("late", late), **_tail("held", held)}


def _tail(name: str, ms: list[float]) -> dict[str, float]:
    p99, p999 = np.quantile(ms, (0.99, 0.999)).tolist()
    return {f"{name}_p99_ms": p99, f"{name}_p999_ms": p999, f"{name}_max_ms": max(ms)}
