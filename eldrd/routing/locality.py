"""ELDR's locality band: near the request's experts first, then the least loaded. No files, no fitting, no clocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numba import njit

from eldrd.partitions.file import mismatches
from eldrd.partitions.transform import Scorer
from eldrd.routing.load import ShortestQueue, compiled_inputs
from eldrd.routing.policy import Decision, NoWorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition

BAND: Final = "band"
NO_PARTITION: Final = "no_partition"
SIGNATURE_MISSING: Final = "signature_missing"
SIGNATURE_MISMATCH: Final = "signature_mismatch"
NO_AFFINITY: Final = "no_affinity"


class LocalityBand:
    """Of the usable workers whose centroid's cosine to the request is within tau of the best usable one's, the one with
    the fewest requests in flight; ties go to the higher cosine. Source: ELDR (arXiv 2607.00466), locality band.

    Falls back to jsq, with the reason on the decision: no_partition; signature_missing (no counts); signature_mismatch
    (counts of another width than the partition's); no_affinity (the request shares nothing with any usable worker).
    """

    name: ClassVar[str] = "eldr"
    wants_signature: ClassVar[bool] = True

    def __init__(self, partition: Partition | None, workers: Sequence[str], tau: float) -> None:
        """workers: the fleet's decode workers in row order, the partition's in any order. tau: 0 is locality alone, 1
        and more is jsq. Raises ValueError for a partition of other workers or a tau outside 0..2."""
        if not (math.isfinite(tau) and 0 <= tau <= 2):
            raise ValueError(f"tau is {tau}, expected 0..2")
        self._tau = float(tau)  # an int would compile a kernel of its own
        self._fallback = ShortestQueue()
        self._scorer: Scorer | None = None
        if partition is not None:
            if problems := mismatches(partition, workers, None):
                raise ValueError("; ".join(problems))
            rows = [partition.workers.index(worker) for worker in workers]
            self._scorer = Scorer(partition.centroids[rows], partition.idf, partition.layers)

    def choose(
        self, in_flight: NDArray[np.int32], usable: NDArray[np.bool_], counts: NDArray[np.int32] | None
    ) -> Decision:
        """See Policy."""
        if self._scorer is None:
            return self._fallback.choose_because(NO_PARTITION, in_flight, usable)
        if counts is None:
            return self._fallback.choose_because(SIGNATURE_MISSING, in_flight, usable)
        if counts.size != self._scorer.width:
            return self._fallback.choose_because(SIGNATURE_MISMATCH, in_flight, usable)
        in_flight, usable = compiled_inputs(in_flight, usable)
        scores = self._scorer(counts)
        if scores.shape != usable.shape:
            raise ValueError(f"usable has {usable.size} workers, the partition {scores.size}")
        worker, candidates, score = _band(scores, in_flight, usable, self._tau)
        if worker < 0:
            raise NoWorkerError
        if score <= 0:
            return self._fallback.choose_because(NO_AFFINITY, in_flight, usable)
        return Decision(worker, score, candidates, BAND)


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) what this module runs, scoring included."""
    scores = Scorer(np.eye(2, dtype=np.float32), np.ones((1, 2), np.float32), np.zeros(1, np.int32))
    _band(scores(np.ones(2, np.int32)), np.zeros(2, np.int32), np.ones(2, np.bool_), 0.1)


@njit(cache=True)
def _band(scores: Any, in_flight: Any, usable: Any, tau: Any) -> Any:
    """(row, rows in the band, the row's score); row -1 if none is usable, score 0 if the best score is not above 0."""
    best = -np.inf
    for row in range(scores.size):
        if usable[row] and scores[row] > best:
            best = np.float64(scores[row])
    if best == -np.inf:
        return -1, 0, 0.0
    if best <= 0:
        return 0, 0, 0.0
    chosen = -1
    candidates = 0
    for row in range(scores.size):
        if usable[row] and np.float64(scores[row]) >= best - tau:
            candidates += 1
            if (
                chosen < 0
                or in_flight[row] < in_flight[chosen]
                or (in_flight[row] == in_flight[chosen] and scores[row] > scores[chosen])
            ):
                chosen = row
    return chosen, candidates, np.float64(scores[chosen])
