"""Feeds the signatures of live requests to a capture on disk, with all file work off the loop. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from eldrd.signatures.capture import CaptureError, CaptureWriter

if TYPE_CHECKING:
    from eldrd.signatures.capture import Shard
    from eldrd.signatures.geometry import Geometry
    from eldrd.signatures.receiver import Signature
    from eldrd.telemetry.metrics import Metrics

log = structlog.get_logger()

_FLUSH_S: Final = 5.0
# Requests held while the directory is being opened; a capture is a sample, so more may go.
_HELD: Final = 1024


class Recorder:
    """One capture. The directory is opened when the first signature says what the geometry is."""

    def __init__(self, directory: str, max_bytes: int, metrics: Metrics) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._outcomes = {k: metrics.captured.labels(k) for k in ("added", "full", "not_exact", "failed")}
        self._writer: CaptureWriter | None = None
        self._geometry: Geometry | None = None
        self._held: list[tuple[Signature, int, str | None]] = []
        self._lock = asyncio.Lock()
        self._failed = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, signature: Signature, output_tokens: int, label: str | None) -> None:
        """Take one request's signature; only exact ones are kept."""
        if signature.state != "exact":
            self._outcomes["not_exact"].inc()
            return
        if self._geometry is None:
            self._geometry = signature.geometry
        unopened = self._writer is None and len(self._held) >= _HELD
        if self._failed or self._closing.is_set() or unopened or signature.geometry != self._geometry:
            self._outcomes["failed"].inc()
            return
        self._held.append((signature, output_tokens, label))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._later())

    async def _later(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), _FLUSH_S if self._writer is not None else 0.0)
        await self.flush()

    async def flush(self) -> None:
        """Write what has been added so far."""
        async with self._lock:
            while self._held and not self._failed:
                held, self._held = self._held, []
                taken = 0
                try:
                    if self._writer is None:
                        self._writer = await asyncio.to_thread(
                            CaptureWriter, self._directory, held[0][0].geometry, self._max_bytes
                        )
                        log.info("capture_opened", directory=str(self._directory), requests=self._writer.requests)
                    for signature, output_tokens, label in held:
                        # Many copies in a row would hold the loop; a shard's worth is a few milliseconds.
                        fits = self._writer.add(signature.counts, signature.tokens, output_tokens, label)
                        self._outcomes["added" if fits else "full"].inc()
                        taken += 1
                        if shard := self._writer.take_full_shard():
                            await asyncio.to_thread(self._writer.write, shard)
                    await self._rest(self._writer)
                except (CaptureError, OSError, ValueError) as e:
                    self._failed = True
                    self._outcomes["failed"].inc(len(held) - taken + len(self._held))
                    self._held.clear()
                    log.error("capture_failed", problem=str(e))

    @staticmethod
    async def _rest(writer: CaptureWriter) -> None:
        shard: Shard | None
        while shard := writer.take_shard():
            await asyncio.to_thread(writer.write, shard)

    async def close(self) -> None:
        """Write the rest; nothing is taken from now on."""
        self._closing.set()
        if self._task is not None:
            await self._task
        await self.flush()
