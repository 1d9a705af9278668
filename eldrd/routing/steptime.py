"""Step time of a decode worker from active experts and requests in flight, given or learned. No arrays of experts here.

step time = base + per_expert * (active experts, mean a layer) + per_request * (requests in flight)        [ms]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Observations count down to 1/e over this many later ones of the same worker (of the fleet: times the workers).
_MEMORY: Final = 256
# The given coefficients weigh on the fleet's, and the fleet's on a worker's, as much as so many observations.
_FLEET_PRIOR: Final = 8.0
_WORKER_PRIOR: Final = 32.0
# Huber's constant: residuals beyond 1.345 sigma count by their sign alone (95 % efficient for normal errors).
_HUBER: Final = 1.345
_SIGMA_PER_MEAN_ABS: Final = 1.2533
# A learned coefficient stays within this factor of the given one, both taken on the fleet's own scale: active experts and
# load rise together, so that data of a steady fleet say little about each alone.
_RANGE: Final = 8.0
_COMMON: Final = 0.1
_SOLVE_EVERY: Final = 8


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds: of a step with nothing in it, of one more active expert in every layer, of one more request. Raises
    ValueError for a negative or infinite one, or all zero."""

    base_ms: float = 5.5
    expert_ms: float = 0.2
    request_ms: float = 0.06

    def __post_init__(self) -> None:
        values = self.base_ms, self.expert_ms, self.request_ms
        if not all(math.isfinite(v) and v >= 0 for v in values) or not any(values[1:]):
            raise ValueError(f"step time is {values}, expected numbers from 0 on, not both of the last two 0")


class Learner:
    """Coefficients per worker slot, from the given ones on by least squares over measured TPOT.

    Robust: Huber's loss, old observations fade, and every worker's coefficients are drawn to the fleet's and the fleet's
    to the given ones (ridge regression in multiples of the given ones). What is given need not fit the machine: only its
    proportions are held to, on the scale that is measured. A worker that is slower than others gets its own; one that has
    served little is judged as the fleet.

    rows: float64 [slots, 3], milliseconds, as StepTime; the kernels read it.
    """

    def __init__(self, given: StepTime, *, learn: bool) -> None:
        self.given = given
        self.learn = learn
        self._unit = np.array([given.base_ms, given.expert_ms, given.request_ms])
        self._fleet = np.ones(3)
        self._fleet_sums = np.zeros((4, 4))
        self._sums: NDArray[np.float64] = np.zeros((0, 4, 4))
        self._spread: NDArray[np.float64] = np.zeros(0)
        self._seen: NDArray[np.int64] = np.zeros(0, np.int64)
        self.rows: NDArray[np.float64] = np.zeros((0, 3))

    def reserve(self, slots: Sequence[int]) -> None:
        """Make room for workers of these slots, which begin as the fleet is."""
        more = max(slots, default=-1) + 1 - len(self.rows)
        if more > 0:
            self.rows = np.concatenate([self.rows, np.tile(self._unit * self._fleet, (more, 1))])
            self._sums = np.concatenate([self._sums, np.zeros((more, 4, 4))])
            self._spread = np.concatenate([self._spread, np.zeros(more)])
            self._seen = np.concatenate([self._seen, np.zeros(more, np.int64)])

    def observe(self, slot: int, active: float, requests: float, tpot_ms: float) -> None:
        """One answer of mean ``tpot_ms`` a token from a worker that meanwhile had so many active experts and requests,
        on average. Nothing happens unless learning is on."""
        if not self.learn or not (math.isfinite(tpot_ms) and tpot_ms > 0):
            return
        x = self._unit * (1.0, active, requests)
        # The spread is around the worker's current line, not its mean, and bounded: one outlier does not widen it.
        residual = abs(tpot_ms - float(self.rows[slot] @ (1.0, active, requests)))
        spread = float(self._spread[slot])
        rate = max(1 / (int(self._seen[slot]) + 1), 1 / 64)
        self._spread[slot] += rate * ((min(residual, 4 * spread) if spread else residual) - spread)
        limit = _HUBER * _SIGMA_PER_MEAN_ABS * max(spread, 1e-3 * tpot_ms)
        weight = 1.0 if not spread or residual <= limit else limit / residual
        seen = np.zeros((4, 4))
        seen[:3] = np.outer(x, (*x, tpot_ms))
        seen[3, 3] = 1
        seen *= weight
        self._sums[slot] = self._sums[slot] * (1 - 1 / _MEMORY) + seen
        self._fleet_sums = self._fleet_sums * (1 - 1 / (_MEMORY * max(1, int((self._seen > 0).sum())))) + seen
        self._seen[slot] += 1
        if self._seen[slot] % _SOLVE_EVERY == 0:
            scale = _scale(self._fleet_sums)
            self._fleet = _ridge(self._fleet_sums, np.full(3, scale), scale, _FLEET_PRIOR)
            self.rows[slot] = self._unit * _ridge(self._sums[slot], self._fleet, scale, _WORKER_PRIOR)


def _scale(sums: NDArray[np.float64]) -> float:
    """How many times the given step times the measured ones are, by least squares."""
    return max(float(sums[:3, 3].sum() / sums[:3, :3].sum()), 1e-6)


def _ridge(sums: NDArray[np.float64], centre: NDArray[np.float64], scale: float, prior: float) -> NDArray[np.float64]:
    """Multiples float64 [3] that fit sums [X'X | X'y] and lie near ``centre``, which weighs like ``prior`` observations,
    and within _RANGE of ``scale``; sums of weights are in the last row."""
    gram, moment, weights = sums[:3, :3], sums[:3, 3], float(sums[3, 3])
    # Mostly each on its own scale: requests weigh so little in the given times that a common one would never let them
    # learn; but also a little in common, since alone they would take on what is noise of the others.
    own = np.diag(gram)
    pull = prior / weights * ((1 - _COMMON) * own + _COMMON * own.mean())
    solved = np.linalg.solve(gram + np.diag(pull), moment + pull * centre)
    return np.clip(solved, scale / _RANGE, scale * _RANGE)
