"""Union routing, bare and with a band: a request goes where it costs the least, by what every worker runs. No files.

With Batches' active experts A and Learner's coefficients a0, a1, a2, a request that adds dA to a worker of n requests

    cost = weight * n * (a1 * dA + a2)  +  a0 + a1 * (A + dA) + a2 * (n + 1)                                     [ms]

what everybody there loses at every token plus what the request itself gets. Under expert parallelism A and dA are those
of the most loaded rank, which all others wait for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numba import njit

from eldrd.routing.batches import Batches, Running
from eldrd.routing.batches import warm_up as warm_up_batches
from eldrd.routing.load import ShortestQueue, compiled_inputs
from eldrd.routing.locality import SIGNATURE_MISMATCH, SIGNATURE_MISSING, Band
from eldrd.routing.policy import Decision, Figure, NoWorkerError, Policy
from eldrd.routing.steptime import Learner, StepTime

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition

UNION: Final = "union"
GUARDED: Final = "guarded"
SOFT: Final = "soft"


class Union(Policy):
    """The usable worker of least cost; ties take turns. Needs no partition and no calibration.

    Falls back to jsq, with the reason on the decision: signature_missing (no counts); signature_mismatch (counts of
    another shape than those of the requests that run). Such requests still count where they run, as average ones.
    """

    name: ClassVar[str] = "union"
    wants_signature: ClassVar[bool] = True

    def __init__(
        self,
        slots: Sequence[int],
        step: StepTime,
        *,
        learn: bool = True,
        weight: float = 1.0,
        ranks: NDArray[np.int32] | int = 1,
        before: Policy | None = None,
    ) -> None:
        """slots: of each worker in row order, its own for good; step, learn: see Learner; weight: of what the others
        lose, higher is better for tails; ranks: see Batches; before: the policy this one takes over from: what its
        workers run is known on, if the rank map is the same, and what was learned, if ``step`` is."""
        self._slots = np.array(slots, np.intp)
        self._weight = checked(weight, "weight")
        self._fallback = ShortestQueue()
        self._next = 0
        self._level: NDArray[np.float32] = np.zeros(len(slots), np.float32)
        self._batches, self._learner = Batches(ranks), Learner(step, learn=learn)
        if isinstance(before, Union):
            if np.array_equal(before._batches.ranks, self._batches.ranks):
                self._batches = before._batches
            if before._learner.given == step and before._learner.learn == learn:
                self._learner = before._learner
        self._batches.reserve(slots)
        self._learner.reserve(slots)

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy."""
        del label
        reason = self._why_not(counts, tokens)
        if reason or counts is None:
            return self._fallback.choose_because(reason, in_flight, usable)
        in_flight, usable = compiled_inputs(in_flight, usable)
        return self._cheapest(UNION, in_flight, usable, counts, tokens)

    def admitted(self, worker: int, counts: NDArray[np.int32] | None, tokens: int, now: float) -> Running:
        """See Policy."""
        return self._batches.admit(int(self._slots[worker]), counts, tokens, now)

    def ended(self, admission: object, now: float, tpot_s: float | None = None) -> None:
        """See Policy."""
        assert isinstance(admission, Running)
        if tpot_s is not None and admission.open and admission.units is not None:
            active, requests = self._batches.means(admission, now)
            self._learner.observe(admission.slot, active, requests, tpot_s * 1e3)
        self._batches.end(admission, now)

    def figures(self) -> Iterable[Figure]:
        """Expected active experts and requests of each worker, and its coefficients in milliseconds."""
        for row, slot in enumerate(self._slots.tolist()):
            yield Figure(row, "active_experts", float(self._batches.active[slot]))
            for name, value in zip(("base_ms", "expert_ms", "request_ms"), self._learner.rows[slot], strict=True):
                yield Figure(row, name, float(value))

    def _why_not(self, counts: NDArray[np.int32] | None, tokens: int) -> str:
        """Why there is nothing to compute a cost from, empty if there is."""
        if counts is None or tokens <= 0:
            return SIGNATURE_MISSING
        return "" if self._batches.fits(counts) else SIGNATURE_MISMATCH

    def _cheapest(
        self,
        reason: str,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32],
        tokens: int,
        scores: NDArray[np.float32] | None = None,
        pull: float = 0.0,
    ) -> Decision:
        """scores: float32 [W]; pull: active experts that a worker's cost rises by for each unit its score is below the
        best."""
        added = self._batches.added(counts, tokens, self._slots)
        worker, candidates, cost = _least(
            added,
            in_flight,
            usable,
            self._slots,
            self._batches.active,
            self._learner.rows,
            self._weight,
            self._next,
            self._level if scores is None else scores,
            pull,
        )
        if worker < 0:
            raise NoWorkerError
        self._next = worker + 1
        return Decision(worker, cost, candidates, reason)


class GuardedBand(Union):
    """The paper's band and union's cost behind a load guard, in this order:

    guard   workers with at most (1 + guard) * mean + 1 requests in flight, of the usable ones
    band    of those, the ones whose centroid's cosine to the request is within tau of the best's
    cost    of those, the one of least cost, as union's

    Without a partition, with one of another geometry, or where the request shares nothing with any centroid, the band
    holds everybody. A centroid remembers what small batches do not show; the guard keeps the tail.
    """

    name: ClassVar[str] = "guarded_band"

    def __init__(
        self,
        slots: Sequence[int],
        step: StepTime,
        *,
        partition: Partition | None,
        workers: Sequence[str],
        guard: float,
        tau: float,
        learn: bool = True,
        weight: float = 1.0,
        ranks: NDArray[np.int32] | int = 1,
        before: Policy | None = None,
    ) -> None:
        """partition, workers, tau: see LocalityBand; the rest: see Union. Raises ValueError as they do, and for a guard
        outside 0..100."""
        super().__init__(slots, step, learn=learn, weight=weight, ranks=ranks, before=before)
        self._guard = checked(guard, "guard")
        self._band = None if partition is None else Band(partition, workers, tau)

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy."""
        del label
        reason = self._why_not(counts, tokens)
        if reason or counts is None:
            return self._fallback.choose_because(reason, in_flight, usable)
        in_flight, usable = compiled_inputs(in_flight, usable)
        kept = _guarded(in_flight, usable, self._guard)
        if self._band is not None and self._band.fits(counts):
            kept = self._band.keep(counts, kept)
        return self._cheapest(GUARDED, in_flight, kept, counts, tokens)


class SoftBand(Union):
    """Union's cost behind a load guard, with a pull to the nearest centroid in place of the band's edge:

    guard   workers with at most (1 + guard) * mean + 1 requests in flight, of the usable ones
    cost    union's, + a1 * pull * k * (best - cosine)        k: experts that a token selects in a layer (of a rank)

    Where batches are small, what runs on a worker says little of what it will run, and the centroid decides; where they
    are large, n * dA outgrows the pull, which does not depend on n, and the centroid only breaks near ties. Traffic that
    has drifted is about as far from all centroids, so that the pull fades. Without a partition, or with one of another
    geometry, there is no pull.
    """

    name: ClassVar[str] = "soft_band"

    def __init__(
        self,
        slots: Sequence[int],
        step: StepTime,
        *,
        partition: Partition | None,
        workers: Sequence[str],
        guard: float,
        pull: float,
        learn: bool = True,
        weight: float = 1.0,
        ranks: NDArray[np.int32] | int = 1,
        before: Policy | None = None,
    ) -> None:
        """partition, workers: see Band; the rest: see Union. Raises ValueError as they do, and for a guard or pull
        outside 0..100."""
        super().__init__(slots, step, learn=learn, weight=weight, ranks=ranks, before=before)
        self._guard, self._pull = checked(guard, "guard"), checked(pull, "pull")
        self._band = None if partition is None else Band(partition, workers, 0.0)

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy."""
        del label
        reason = self._why_not(counts, tokens)
        if reason or counts is None:
            return self._fallback.choose_because(reason, in_flight, usable)
        in_flight, usable = compiled_inputs(in_flight, usable)
        kept = _guarded(in_flight, usable, self._guard)
        if self._band is None or not self._band.fits(counts):
            return self._cheapest(SOFT, in_flight, kept, counts, tokens)
        # Every token selects as many experts in one layer as in another, and a rank has its share of them.
        pull = self._pull * float(counts[0].sum()) / tokens / self._batches.rank_count
        return self._cheapest(SOFT, in_flight, kept, counts, tokens, self._band.scores(counts), pull)


def checked(value: float, name: str) -> float:
    """value as a float. Raises ValueError outside 0..100."""
    if not (math.isfinite(value) and 0 <= value <= 100):
        raise ValueError(f"{name} is {value}, expected 0..100")
    return float(value)


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) what this module runs."""
    warm_up_batches()
    policy = Union([0, 1], StepTime(), learn=False)
    policy.choose(np.zeros(2, np.int32), np.ones(2, np.bool_), np.ones((1, 2), np.int32), 1)
    _guarded(np.zeros(2, np.int32), np.ones(2, np.bool_), 0.1)


@njit(cache=True)
def _guarded(in_flight: Any, usable: Any, guard: Any) -> Any:
    """The usable rows that have no more than (1 + guard) * mean + 1 in flight: bool [W]."""
    total = 0
    rows = 0
    for row in range(usable.size):
        if usable[row]:
            total += in_flight[row]
            rows += 1
    most = (1 + guard) * total / max(rows, 1) + 1
    kept = np.empty(usable.size, np.bool_)
    for row in range(usable.size):
        kept[row] = usable[row] and in_flight[row] <= most
    return kept


@njit(cache=True)
def _least(
    added: Any,
    in_flight: Any,
    usable: Any,
    slots: Any,
    active: Any,
    coefficients: Any,
    weight: Any,
    start: Any,
    scores: Any,
    pull: Any,
) -> Any:
    """(row, usable rows, cost): the first row of least cost from ``start`` on, wrapping; row -1 if none."""
    nearest = np.float32(-np.inf)
    for row in range(scores.size):
        if usable[row]:
            nearest = max(nearest, scores[row])
    best = -1
    candidates = 0
    least = np.inf
    workers = in_flight.size
    for i in range(workers):
        row = (start + i) % workers
        if usable[row]:
            candidates += 1
            slot = slots[row]
            base, expert, request = coefficients[slot, 0], coefficients[slot, 1], coefficients[slot, 2]
            n, more = in_flight[row], np.float64(added[row])
            lost = expert * more + request
            cost = weight * n * lost + base + expert * active[slot] + request * n + lost
            cost += expert * pull * np.float64(nearest - scores[row])
            if cost < least:
                best, least = row, cost
    return best, candidates, least
