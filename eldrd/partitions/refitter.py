"""Online refit: the rolling window of live signatures, when it is refitted and what becomes of it. Computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Final, Literal

import structlog
from threadpoolctl import threadpool_limits

from eldrd.partitions import file as partition_file
from eldrd.partitions.refit import refit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from eldrd.config import Refit as Settings
    from eldrd.partitions.file import Partition
    from eldrd.partitions.refit import Refit
    from eldrd.signatures.receiver import Signature
    from eldrd.telemetry.metrics import Metrics

log = structlog.get_logger()

# Requests a window holds at most, the latest: 48 MB of 48 x 128 counts.
LIMIT: Final = 2_000
_SWITCH_S: Final = 5e-4
OUTCOMES: Final = ("swapped", "kept", "few", "stale", "failed")


def yield_to_loop() -> None:
    """Make this process's threads leave the event loop its core and its turn: for its whole life, before any refit.

    BLAS threads spin between two products, which held the loop up more than anything else; a thread keeps the GIL for
    5 ms by default when another wants it.
    """
    threadpool_limits(1, "blas")
    sys.setswitchinterval(_SWITCH_S)


class Refitter:
    """Refits the current partition every ``every_s`` to the exact signatures of the last ``window_s``, in a thread.

    current: the partition that new requests are routed by; swap: makes another one that; state: where it is kept for the
    next start, None for nowhere. Source: the online refit of ELDR's artifact (casys-kaist/ELDR).
    """

    def __init__(self, current: Callable[[], Partition | None], swap: Callable[[Partition], None], metrics: Metrics):
        self._current = current
        self._swap = swap
        self._metrics = metrics
        self._settings: Settings | None = None
        self._state: Path | None = None
        self._window: deque[tuple[float, Signature]] = deque(maxlen=LIMIT)
        self._task: asyncio.Task[None] | None = None
        self._round = 0

    @property
    def requests(self) -> int:
        """Requests in the window."""
        return len(self._window)

    async def configure(self, settings: Settings, state: Path | None) -> None:
        """Take over these settings: begins, goes on, or ends with an empty window."""
        if (settings, state) == (self._settings, self._state):
            return
        await self.close()
        self._settings, self._state = settings, state
        if settings.enabled:
            self._task = asyncio.get_running_loop().create_task(self._run(settings))

    def add(self, signature: Signature) -> None:
        """One request's signature, as it is decided; cheap, whatever the settings. Only exact ones are kept."""
        if self._task is not None and signature.state == "exact":
            self._window.append((monotonic(), signature))

    async def close(self) -> None:
        """End; the partition stays."""
        task, self._task = self._task, None
        self._window.clear()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self, settings: Settings) -> None:
        while True:
            await asyncio.sleep(settings.every_s)
            try:
                outcome = await self._once(settings)
            except Exception as e:
                # Whatever it is, requests go on being routed by the partition there is.
                outcome = "failed"
                log.error("refit_failed", problem=f"{type(e).__name__}: {e}")
            self._metrics.refits.labels(outcome).inc()

    async def _once(self, settings: Settings) -> str:
        """One refit; its outcome."""
        partition = self._current()
        oldest = monotonic() - settings.window_s
        while self._window and self._window[0][0] < oldest:
            self._window.popleft()
        least = settings.requests
        if partition is None or len(self._window) < least:
            return "few"
        self._round += 1
        started = perf_counter()
        found = await asyncio.to_thread(_refit, partition, list(self._window), least, self._round)
        if isinstance(found, str):
            return found
        self._metrics.refit_seconds.observe(perf_counter() - started)
        if found is None:
            return "kept"
        if self._current() is not partition:
            return "stale"
        self._swap(found.partition)
        self._metrics.refit_objective.set(found.after)
        self._metrics.refit_moved.set(found.moved)
        log.info(
            "refitted",
            requests=found.requests,
            moved=round(found.moved, 4),
            before=round(found.before, 4),
            after=round(found.after, 4),
        )
        if self._state is not None:
            try:
                await asyncio.to_thread(partition_file.save, found.partition, self._state)
            except OSError as e:
                log.warning("refit_not_kept", problem=str(e))
        return "swapped"


def _refit(
    partition: Partition, window: list[tuple[float, Signature]], least: int, seed: int
) -> Refit | Literal["few"] | None:
    """Refit to the signatures of the partition's own model, if there are as many as ``least``; runs off the loop."""
    rows = [s.counts for _, s in window if s.geometry == partition.geometry]
    return refit(partition, rows, seed) if len(rows) >= max(least, len(partition.workers)) else "few"
