"""What every decode worker runs, as expected active experts: the state of union routing. Chooses nobody, no clocks.

A request is p[l, e], the probability that one of its decode tokens selects expert e in layer l, estimated from its
prompt: p = (counts + 8 * prior) / (tokens + 8), below 0.98, where the prior is the mean over recent requests. A worker
is the sum over its requests of log2(1 - p), so that q = 2 ** sum is the chance that a step reads no expert e there.

Logarithms are kept in steps of 1 / 8192 as whole numbers: adding and subtracting them is exact, and a worker whose
requests have all left is exactly empty, however long it ran. No periodic recomputation is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PSEUDO_TOKENS: Final = 8.0
P_MAX: Final = 0.98
UNITS: Final = 8192
# The prior follows this many requests.
_PRIOR_REQUESTS: Final = 1000


class Running:
    """A request that decodes on a worker. units: uint16 [L * E], its share of the worker's sum, None if unknown; the
    areas are the worker's when it came, see ``Batches.means``."""

    __slots__ = ("area_active", "area_requests", "open", "since", "slot", "units")

    def __init__(self, slot: int, units: NDArray[np.uint16] | None) -> None:
        self.slot = slot
        self.units = units
        self.open = True
        self.since = self.area_active = self.area_requests = 0.0


class Batches:
    """State per worker slot; slots are a worker's own for good, so a reload keeps the state.

    active: float64 [slots], expected distinct experts of a step, mean a layer; under expert parallelism those of the
    most loaded rank. requests: int64 [slots]. rank_count: expert-parallel ranks of a worker.

    ranks: int [L, E], the expert-parallel rank of each expert; or a number of ranks with E / number consecutive
    experts each. Raises ValueError for ranks that are not 0..R-1.
    """

    def __init__(self, ranks: NDArray[np.int32] | int = 1) -> None:
        if isinstance(ranks, int):
            if ranks < 1:
                raise ValueError(f"ep_ranks is {ranks}, expected at least 1")
        elif ranks.ndim != 2 or np.unique(ranks).tolist() != list(range(int(ranks.max()) + 1)):
            raise ValueError("the rank map must be [layers, experts] of ranks from 0, none left out")
        self.ranks = ranks
        self.shape: tuple[int, int] = (0, 0)
        self.active: NDArray[np.float64] = np.zeros(0)
        self.requests: NDArray[np.int64] = np.zeros(0, np.int64)
        self._since: list[float] = []
        self._area_active: list[float] = []
        self._area_requests: list[float] = []
        self._known = 0
        self._seen = 0
        self._scale = 1.0
        self.rank_count = 1
        self._order: NDArray[np.intp] | None = None
        self._bounds: NDArray[np.int64] = np.zeros(1, np.int64)
        self._prior: NDArray[np.float32] = np.zeros(0, np.float32)
        self._p: NDArray[np.float32] = np.zeros(0, np.float32)
        self._sums: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._free: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._read: NDArray[np.float32] = np.zeros((0, 0), np.float32)

    def fits(self, counts: NDArray[np.int32]) -> bool:
        """Whether counts [L, E] are of the model that runs; the first ones say which it is, as do the first after all
        requests of another have ended."""
        if counts.shape == self.shape:
            return True
        if counts.ndim != 2 or self._known or (not isinstance(self.ranks, int) and counts.shape != self.ranks.shape):
            return False
        if isinstance(self.ranks, int) and counts.shape[1] % self.ranks:
            return False
        self._shaped((counts.shape[0], counts.shape[1]))
        return True

    def reserve(self, slots: Sequence[int]) -> None:
        """Make room for workers of these slots; those that are there stay as they are."""
        have, need = len(self.requests), max(slots, default=-1) + 1
        if need <= have:
            return
        more = need - have
        self.active = np.concatenate([self.active, np.zeros(more)])
        self.requests = np.concatenate([self.requests, np.zeros(more, np.int64)])
        for kept in (self._since, self._area_active, self._area_requests):
            kept.extend([0.0] * more)
        width = self._sums.shape[1]
        self._sums = np.concatenate([self._sums, np.zeros((more, width), np.int32)])
        self._free = np.concatenate([self._free, np.ones((more, width), np.float32)])
        self._read = np.concatenate([self._read, np.zeros((more, self._read.shape[1]), np.float32)])

    def added(self, counts: NDArray[np.int32], tokens: int, slots: NDArray[np.intp]) -> NDArray[np.float32]:
        """How many active experts the request would add to each worker of slots [W], mean a layer: float32 [W].
        Only for counts that ``fits``."""
        self._estimate(counts, tokens)
        out = np.empty(len(slots), np.float32)
        _added(self._p, self._free, slots, self._bounds, self.rank_count, self._read, np.float32(self._scale), out)
        return out

    def admit(self, slot: int, counts: NDArray[np.int32] | None, tokens: int, now: float) -> Running:
        """Count a request in; without counts, or with another model's, as the mean of the recent ones."""
        self._advance(slot, now)
        if counts is not None and tokens > 0 and self.fits(counts):
            ordered = self._estimate(counts, tokens)
            self._seen = min(self._seen + 1, _PRIOR_REQUESTS)
            _learn(ordered, np.float32(1 / tokens), np.float32(1 / self._seen), self._prior)
        elif self._seen:
            np.minimum(self._prior, np.float32(P_MAX), out=self._p)
        else:
            return self._opened(Running(slot, None))
        units = np.empty(self._p.size, np.uint16)
        _enter(self._p, units, self._sums[slot], self._free[slot], self._bounds, self._read[slot])
        self._known += 1
        self.active[slot] = self._total(slot)
        return self._opened(Running(slot, units))

    def end(self, running: Running, now: float) -> None:
        """Count a request out; once, however often it is called."""
        if not running.open:
            return
        running.open = False
        slot = running.slot
        self._advance(slot, now)
        self.requests[slot] -= 1
        if running.units is not None:
            _leave(running.units, self._sums[slot], self._free[slot], self._bounds, self._read[slot])
            running.units = None
            self._known -= 1
            self.active[slot] = self._total(slot)

    def means(self, running: Running, now: float) -> tuple[float, float]:
        """(active experts, requests) of the worker, mean over the time that the request has been there."""
        slot = running.slot
        self._advance(slot, now)
        seconds = now - running.since
        if seconds <= 0:
            return float(self.active[slot]), float(self.requests[slot])
        active, requests = self._area_active[slot], self._area_requests[slot]
        return (active - running.area_active) / seconds, (requests - running.area_requests) / seconds

    def _opened(self, running: Running) -> Running:
        slot = running.slot
        self.requests[slot] += 1
        running.since = self._since[slot]
        running.area_active, running.area_requests = self._area_active[slot], self._area_requests[slot]
        return running

    def _advance(self, slot: int, now: float) -> None:
        seconds = now - self._since[slot]
        self._since[slot] = now
        self._area_active[slot] += float(self.active[slot]) * seconds
        self._area_requests[slot] += float(self.requests[slot]) * seconds

    def _total(self, slot: int) -> float:
        read = self._read[slot].reshape(-1, self.rank_count)
        return float(read.max(axis=1).sum() if self.rank_count > 1 else read.sum()) * self._scale

    def _ordered(self, counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Counts in the state's own order, int32 [L * E] as the kernels were compiled for."""
        flat = counts.reshape(-1)
        if self._order is not None:
            return np.asarray(flat[self._order], np.int32)
        return flat if flat.dtype == np.int32 and flat.flags.carray else np.array(flat, np.int32)

    def _estimate(self, counts: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
        """Compute p of a request; its counts in the state's own order."""
        ordered = self._ordered(counts)
        if not self._seen:
            # Before anything is known of a model, its experts are alike.
            self._prior[:] = counts.sum() / tokens / counts.size
        _expect(ordered, self._prior, np.float32(1 / (tokens + PSEUDO_TOKENS)), self._p)
        return ordered

    def _shaped(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        layers, experts = shape
        width, slots = layers * experts, len(self.requests)
        self._seen = 0
        self._order = None
        self._scale = 1 / layers
        self.rank_count = self.ranks if isinstance(self.ranks, int) else int(self.ranks.max()) + 1
        if self.rank_count == 1:
            self._bounds = np.array([0, width], np.int64)
        elif isinstance(self.ranks, int):
            self._bounds = np.arange(0, width + 1, max(experts // self.rank_count, 1), dtype=np.int64)
        else:
            # Experts of one rank side by side: the kernels add up consecutive cells.
            self._order = (np.argsort(self.ranks, axis=1, kind="stable") + np.arange(layers)[:, None] * experts).ravel()
            sizes = (self.ranks[:, :, None] == np.arange(self.rank_count)).sum(axis=1).ravel()
            self._bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._prior = np.zeros(width, np.float32)
        self._p = np.empty(width, np.float32)
        self._sums = np.zeros((slots, width), np.int32)
        self._free = np.ones((slots, width), np.float32)
        self._read = np.zeros((slots, len(self._bounds) - 1), np.float32)


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) what this module runs."""
    counts = np.ones((2, 4), np.int32)
    for ranks in (1, 2):
        batches = Batches(ranks)
        batches.reserve([0, 1])
        batches.fits(counts)
        batches.added(counts, 2, np.arange(2, dtype=np.intp))
        batches.end(batches.admit(1, counts, 2, 0.0), 1.0)


@njit(cache=True, nogil=True, fastmath=True)
def _expect(counts: Any, prior: Any, weight: Any, p: Any) -> None:
    """p = (counts + 8 * prior) * weight, at most 0.98."""
    for d in range(p.size):
        value = (np.float32(counts[d]) + np.float32(PSEUDO_TOKENS) * prior[d]) * weight
        p[d] = min(value, np.float32(P_MAX))


@njit(cache=True, nogil=True, fastmath=True)
def _learn(counts: Any, weight: Any, rate: Any, prior: Any) -> None:
    for d in range(prior.size):
        prior[d] += rate * (np.float32(counts[d]) * weight - prior[d])


@njit(cache=True, nogil=True, fastmath=True)
def _added(p: Any, free: Any, slots: Any, bounds: Any, ranks: Any, read: Any, scale: Any, out: Any) -> None:
    """Sum over layers of what p adds to the most loaded rank's active experts, for each worker."""
    segments = bounds.size - 1
    for i in range(slots.size):
        row, before = free[slots[i]], read[slots[i]]
        total = np.float32(0)
        for first in range(0, segments, ranks):
            most = after = np.float32(0)
            for s in range(first, first + ranks):
                # Slices, not offsets: LLVM makes vectors of loops from 0 only, as no index can be negative.
                mine, left = p[bounds[s] : bounds[s + 1]], row[bounds[s] : bounds[s + 1]]
                dot = np.float32(0)
                for d in range(mine.size):
                    dot += mine[d] * left[d]
                most = max(most, before[s])
                after = max(after, before[s] + dot)
            total += after - most
        out[i] = total * scale


@njit(cache=True, nogil=True, fastmath=True)
def _enter(p: Any, units: Any, sums: Any, free: Any, bounds: Any, read: Any) -> None:
    """Add a request: units = -log2(1 - p) * 8192, rounded."""
    for d in range(p.size):
        free[d] = np.float32(1) - p[d]
    bits = free.view(np.int32)
    for d in range(p.size):
        exponent = np.float32((bits[d] >> np.int32(23)) - np.int32(127))
        bits[d] = (bits[d] & np.int32(0x7FFFFF)) | np.int32(0x3F800000)
        x = free[d] - np.float32(1)
        # log2(1 + x) on [0, 1], Chebyshev fit, within 2.2e-6: a fiftieth of a unit.
        log = np.float32(-0.025123203)
        log = log * x + np.float32(0.119298238)
        log = log * x + np.float32(-0.274623258)
        log = log * x + np.float32(0.455527088)
        log = log * x + np.float32(-0.717557872)
        log = log * x + np.float32(1.442475315)
        log = log * x + np.float32(2.123740846e-06)
        value = np.float32(0.5) - np.float32(UNITS) * (exponent + log)
        units[d] = np.uint16(np.int32(max(value, np.float32(0))))
    for d in range(sums.size):
        sums[d] = np.int32(sums[d] + np.int32(units[d]))
    _refresh(sums, free, bounds, read)


@njit(cache=True, nogil=True, fastmath=True)
def _leave(units: Any, sums: Any, free: Any, bounds: Any, read: Any) -> None:
    for d in range(sums.size):
        sums[d] = np.int32(sums[d] - np.int32(units[d]))
    _refresh(sums, free, bounds, read)


@njit(cache=True, nogil=True, fastmath=True)
def _refresh(sums: Any, free: Any, bounds: Any, read: Any) -> None:
    """free = 2 ** -(sums / 8192), and the active experts of each segment."""
    bits = free.view(np.int32)
    for d in range(sums.size):
        whole = min(sums[d] >> np.int32(13), np.int32(125))
        x = np.float32(sums[d] & np.int32(UNITS - 1)) * np.float32(1 / UNITS)
        # 2 ** -x on [0, 1], Chebyshev fit, within 6e-8; exactly 1 at 0.
        power = np.float32(-0.000947553646)
        power = power * x + np.float32(0.00921087556)
        power = power * x + np.float32(-0.0552996071)
        power = power * x + np.float32(0.240179489)
        power = power * x + np.float32(-0.693143202)
        free[d] = power * x + np.float32(1)
        bits[d] = np.int32(bits[d] - (whole << np.int32(23)))
    for s in range(bounds.size - 1):
        left = free[bounds[s] : bounds[s + 1]]
        total = np.float32(0)
        for d in range(left.size):
            total += np.float32(1) - left[d]
        read[s] = total
