"""Policies that look at load alone: random, round_robin, jsq, p2c. They keep a cursor or a generator, nothing else."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numba import njit

from eldrd.routing.policy import Decision, NoWorkerError, Policy

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Random(Policy):
    """Any usable worker, evenly. seed: None draws one from the OS."""

    name: ClassVar[str] = "random"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311, not a secret

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None = None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy; the request is not looked at."""
        del counts, tokens, label
        rows = usable_rows(usable)
        worker = self._random.choice(rows)
        return Decision(worker, float(in_flight[worker]), len(rows), self.name)


class RoundRobin(Policy):
    """The next usable worker in row order."""

    name: ClassVar[str] = "round_robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None = None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy; the request is not looked at."""
        del counts, tokens, label
        rows = usable_rows(usable)
        worker = next((row for row in rows if row >= self._next), rows[0])
        self._next = worker + 1
        return Decision(worker, float(in_flight[worker]), len(rows), self.name)


class ShortestQueue(Policy):
    """The usable worker with the fewest requests in flight (join the shortest queue); ties take turns."""

    name: ClassVar[str] = "jsq"

    def __init__(self) -> None:
        self._next = 0

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None = None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy; the request is not looked at."""
        del counts, tokens, label
        return self.choose_because(self.name, in_flight, usable)

    def choose_because(self, reason: str, in_flight: NDArray[np.int32], usable: NDArray[np.bool_]) -> Decision:
        """``choose`` for another policy's fallback, with its reason on the decision."""
        in_flight, usable = compiled_inputs(in_flight, usable)
        worker, candidates = _fewest(in_flight, usable, self._next)
        if worker < 0:
            raise NoWorkerError
        self._next = worker + 1
        return Decision(worker, float(in_flight[worker]), candidates, reason)


class PowerOfTwo(Policy):
    """The less loaded of two usable workers drawn at random (Mitzenmacher 2001). seed: None draws one from the OS."""

    name: ClassVar[str] = "p2c"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311, not a secret

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None = None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy; the request is not looked at."""
        del counts, tokens, label
        rows = usable_rows(usable)
        drawn = self._random.sample(rows, min(2, len(rows)))
        worker = min(drawn, key=in_flight.__getitem__)
        return Decision(worker, float(in_flight[worker]), len(drawn), self.name)


def usable_rows(usable: NDArray[np.bool_]) -> list[int]:
    """Rows of the usable workers in order. Raises NoWorkerError if there is none."""
    rows: list[int] = usable.nonzero()[0].tolist()
    if not rows:
        raise NoWorkerError
    return rows


def compiled_inputs(
    in_flight: NDArray[np.int32], usable: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Both arrays as the kernels were compiled for them: a read-only or strided one would compile on the event loop.
    Raises ValueError if they are not [W] both, which the kernels do not check."""
    if in_flight.ndim != 1 or in_flight.shape != usable.shape:
        raise ValueError(f"in_flight is {in_flight.shape} and usable {usable.shape}, expected [W] both")
    if in_flight.dtype != np.int32 or not in_flight.flags.carray:
        in_flight = np.array(in_flight, np.int32)
    if usable.dtype != np.bool_ or not usable.flags.carray:
        usable = np.array(usable, np.bool_)
    return in_flight, usable


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) what this module runs."""
    ShortestQueue().choose(np.zeros(2, np.int32), np.ones(2, np.bool_))


@njit(cache=True)
def _fewest(in_flight: Any, usable: Any, start: Any) -> Any:
    """(row, usable rows): the first row with the fewest in flight from ``start`` on, wrapping; row -1 if none."""
    best = -1
    candidates = 0
    workers = in_flight.size
    for i in range(workers):
        row = (start + i) % workers
        if usable[row]:
            candidates += 1
            if best < 0 or in_flight[row] < in_flight[best]:
                best = row
    return best, candidates
