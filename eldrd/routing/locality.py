"""ELDR's locality band: near the request's experts first, then the least loaded. No files, no fitting, no clocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numba import njit

from eldrd.partitions.file import mismatches
from eldrd.partitions.transform import Scorer
from eldrd.routing.load import ShortestQueue, compiled_inputs
from eldrd.routing.policy import Decision, NoWorkerError, Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition

BAND: Final = "band"
NO_PARTITION: Final = "no_partition"
SIGNATURE_MISSING: Final = "signature_missing"
SIGNATURE_MISMATCH: Final = "signature_mismatch"
NO_AFFINITY: Final = "no_affinity"


class Band:
    """Which workers are near a request: the cosine of its signature to each worker's centroid, and who is within tau of
    the best."""

    def __init__(self, partition: Partition, workers: Sequence[str], tau: float) -> None:
        """workers: the fleet's decode workers in row order, the partition's in any order. Raises ValueError for a
        partition of other workers or a tau outside 0..2."""
        self.tau = checked_tau(tau)
        if problems := mismatches(partition, workers, None):
            raise ValueError("; ".join(problems))
        rows = [partition.workers.index(worker) for worker in workers]
        self._scorer = Scorer(partition.centroids[rows], partition.idf, partition.layers)

    def fits(self, counts: NDArray[np.int32]) -> bool:
        """Whether counts are as wide as the partition's."""
        return counts.size == self._scorer.width

    def scores(self, counts: NDArray[np.int32]) -> NDArray[np.float32]:
        """Cosines float32 [W], all 0 for a request whose every expert weighs nothing."""
        return self._scorer(counts.reshape(-1))

    def keep(self, counts: NDArray[np.int32], usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The usable rows within tau of the best usable one, bool [W]; all usable ones if the best is not above 0."""
        return np.asarray(_within(self.scores(counts), usable, self.tau), np.bool_)


class LocalityBand(Policy):
    """Of the usable workers whose centroid's cosine to the request is within tau of the best usable one's, the one with
    the fewest requests in flight; ties go to the higher cosine. Source: ELDR (arXiv 2607.00466), locality band.

    With ``second_nearest`` and tau above 0 the second nearest worker joins a band of one, so that load has a say in
    every decision. Source: the authors' artifact (casys-kaist/ELDR).

    Falls back to jsq, with the reason on the decision: no_partition; signature_missing (no counts); signature_mismatch
    (counts of another width than the partition's); no_affinity (the request shares nothing with any usable worker).
    """

    name: ClassVar[str] = "eldr"
    wants_signature: ClassVar[bool] = True

    def __init__(
        self, partition: Partition | None, workers: Sequence[str], tau: float, *, second_nearest: bool = False
    ) -> None:
        """partition, workers: see Band; tau: 0 is locality alone, 1 and more is jsq. Raises ValueError as Band does."""
        self._tau = checked_tau(tau)
        self._second = second_nearest and tau > 0
        self._fallback = ShortestQueue()
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
        del tokens, label
        band = self._band
        if band is None:
            return self._fallback.choose_because(NO_PARTITION, in_flight, usable)
        if counts is None:
            return self._fallback.choose_because(SIGNATURE_MISSING, in_flight, usable)
        if not band.fits(counts):
            return self._fallback.choose_because(SIGNATURE_MISMATCH, in_flight, usable)
        in_flight, usable = compiled_inputs(in_flight, usable)
        scores = band.scores(counts)
        if scores.size != usable.size:
            raise ValueError(f"usable has {usable.size} workers, the partition {scores.size}")
        worker, candidates, score = _band(scores, in_flight, usable, self._tau, self._second)
        if worker < 0:
            raise NoWorkerError
        if score <= 0:
            return self._fallback.choose_because(NO_AFFINITY, in_flight, usable)
        return Decision(worker, score, candidates, BAND)


def checked_tau(tau: float) -> float:
    """tau as a float: an int would compile a kernel of its own. Raises ValueError outside 0..2."""
    if not (math.isfinite(tau) and 0 <= tau <= 2):
        raise ValueError(f"tau is {tau}, expected 0..2")
    return float(tau)


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) what this module runs, scoring included."""
    scores = Scorer(np.eye(2, dtype=np.float32), np.ones((1, 2), np.float32), np.zeros(1, np.int32))
    usable = np.ones(2, np.bool_)
    _band(scores(np.ones(2, np.int32)), np.zeros(2, np.int32), usable, 0.1, False)
    _within(scores(np.ones(2, np.int32)), usable, 0.1)


@njit(cache=True)
def _best(scores: Any, usable: Any) -> Any:
    best = -np.inf
    for row in range(scores.size):
        if usable[row] and scores[row] > best:
            best = np.float64(scores[row])
    return best


@njit(cache=True)
def _within(scores: Any, usable: Any, tau: Any) -> Any:
    """The usable rows within tau of the best usable one, bool [W]; all usable ones if that is not above 0."""
    best = _best(scores, usable)
    kept = np.empty(scores.size, np.bool_)
    for row in range(scores.size):
        kept[row] = usable[row] and (best <= 0 or np.float64(scores[row]) >= best - tau)
    return kept


@njit(cache=True)
def _band(scores: Any, in_flight: Any, usable: Any, tau: Any, second: Any) -> Any:
    """(row, rows in the band, the row's score); row -1 if none is usable, score 0 if the best score is not above 0.
    second: the second best joins a band of one."""
    best = _best(scores, usable)
    if best == -np.inf:
        return -1, 0, 0.0
    if best <= 0:
        return 0, 0, 0.0
    kept = _within(scores, usable, tau)
    if second and kept.sum() == 1:
        runner_up = -1
        for row in range(scores.size):
            if usable[row] and not kept[row] and (runner_up < 0 or scores[row] > scores[runner_up]):
                runner_up = row
        if runner_up >= 0:
            kept[runner_up] = True
    chosen = -1
    for row in range(scores.size):
        if kept[row] and (
            chosen < 0
            or in_flight[row] < in_flight[chosen]
            or (in_flight[row] == in_flight[chosen] and scores[row] > scores[chosen])
        ):
            chosen = row
    return chosen, kept.sum(), np.float64(scores[chosen])
