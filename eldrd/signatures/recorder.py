"""Feeds the signatures of live requests to a capture on disk, with all file work off the loop. Decides nothing.

Where a hook counts generated tokens, a request is held until its decode counts have come, for a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import structlog

from eldrd.signatures.capture import CaptureError, CaptureWriter

if TYPE_CHECKING:
    from eldrd.signatures.capture import Shard
    from eldrd.signatures.geometry import Geometry
    from eldrd.signatures.receiver import Decoded, Signature
    from eldrd.telemetry.metrics import Metrics

log = structlog.get_logger()

_FLUSH_S: Final = 5.0
# The hook sends a request's decode counts with the step after its last: they come with the end of the answer, or as late
# as a busy server's counting is. Only a request whose counts are lost waits so long.
_DECODED_S: Final = 5.0
_LOOK_S: Final = 0.25
# Requests held while the directory is being opened; a capture is a sample, so more may go.
_HELD: Final = 1024


class DecodeCounts(Protocol):
    """Where decode counts come from: the receiver."""

    @property
    def decoding(self) -> bool: ...

    def take_decoded(self, eldr_id: str) -> Decoded | None: ...


@dataclass(slots=True)
class _Held:
    signature: Signature
    output_tokens: int
    label: str | None
    since: float
    decoded: Decoded | None = None


class Recorder:
    """One capture. The directory is opened when the first signature says what the geometry is.

    A capture holds decode counts if a hook counts generated tokens when the first request is written; from then on
    requests without them are left out (outcome ``no_decode``).
    """

    def __init__(
        self, directory: str, max_bytes: int, metrics: Metrics, decode_counts: DecodeCounts | None = None
    ) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        outcomes = ("added", "full", "not_exact", "no_decode", "failed")
        self._outcomes = {k: metrics.captured.labels(k) for k in outcomes}
        self._decode_counts = decode_counts
        self._with_decode: bool | None = None
        self._writer: CaptureWriter | None = None
        self._geometry: Geometry | None = None
        self._held: list[_Held] = []
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
        self._held.append(_Held(signature, output_tokens, label, monotonic()))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._later())

    async def _later(self) -> None:
        while True:
            end = monotonic() + (_FLUSH_S if self._writer is not None else 0.0)
            while (left := end - monotonic()) > 0 and not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), min(left, _LOOK_S))
                self._look()
            await self.flush()
            if not self._held:
                return
            # Only requests whose decode counts have not come are left.
            await asyncio.sleep(_LOOK_S / 5)

    @property
    def _waits(self) -> bool:
        """Whether decode counts may come and are wanted."""
        source = self._decode_counts
        return source is not None and source.decoding and self._with_decode is not False

    def _look(self) -> None:
        """Take the decode counts that have come."""
        if self._waits and self._decode_counts is not None:
            for held in self._held:
                if held.decoded is None:
                    held.decoded = self._decode_counts.take_decoded(held.signature.eldr_id)

    def _settled(self) -> list[_Held]:
        """Take out the requests that wait for nothing any more."""
        self._look()
        waits = self._waits
        oldest = monotonic() - _DECODED_S
        settled = [h for h in self._held if not waits or h.decoded is not None or h.since < oldest]
        self._held = [h for h in self._held if waits and h.decoded is None and h.since >= oldest]
        return settled

    async def flush(self) -> None:
        """Write what has been added so far, but for requests whose decode counts may still come."""
        async with self._lock:
            while not self._failed and (held := self._settled()):
                taken = 0
                try:
                    if self._writer is None:
                        self._writer = await asyncio.to_thread(
                            CaptureWriter, self._directory, held[0].signature.geometry, self._max_bytes
                        )
                        self._with_decode = held[0].decoded is not None or self._waits
                        log.info(
                            "capture_opened",
                            directory=str(self._directory),
                            requests=self._writer.requests,
                            decode_counts=self._with_decode,
                        )
                    for one in held:
                        # Many copies in a row would hold the loop; a shard's worth is a few milliseconds.
                        self._outcomes[self._write(self._writer, one)].inc()
                        taken += 1
                        if shard := self._writer.take_full_shard():
                            await asyncio.to_thread(self._writer.write, shard)
                    await self._rest(self._writer)
                except (CaptureError, OSError, ValueError) as e:
                    self._failed = True
                    self._outcomes["failed"].inc(len(held) - taken + len(self._held))
                    self._held.clear()
                    log.error("capture_failed", problem=str(e))

    def _write(self, writer: CaptureWriter, held: _Held) -> str:
        """Give one request to the writer; the outcome."""
        signature, decoded = held.signature, held.decoded
        if not self._with_decode:
            decoded = None
        elif decoded is None or not _alike(decoded.geometry, signature.geometry):
            return "no_decode"
        counts, output_tokens = None, held.output_tokens
        if decoded is not None:
            # A stream's events may carry several tokens, and only the hook has counted them.
            counts, output_tokens = decoded.counts.astype(np.int32), decoded.tokens + 1
        fits = writer.add(signature.counts, signature.tokens, output_tokens, held.label, counts)
        return "added" if fits else "full"

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


def _alike(a: Geometry, b: Geometry) -> bool:
    """Whether counts of one can stand beside counts of the other: the block size does not matter for whole requests."""
    return (a.layers, a.experts, a.top_k) == (b.layers, b.experts, b.top_k)
