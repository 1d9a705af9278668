"""Policies that look at load alone: random, round_robin, jsq, p2c. They keep a cursor or a generator, nothing else."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from eldrd.routing.policy import Decision, NoWorkerError, Policy

if TYPE_CHECKING:
    from numpy.typing import NDArray


_INT32: Final = np.dtype(np.int32)
_BOOL: Final = np.dtype(np.bool_)


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
        place = bisect_left(rows, self._next)
        worker = rows[place] if place < len(rows) else rows[0]
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
        # Lists: for the few numbers there are, entering a kernel takes longer than all of this.
        loads, up = in_flight.tolist(), usable.tolist()
        if len(loads) != len(up):
            raise _sizes(in_flight, usable)
        candidates = len(up)
        if False in up:
            candidates = up.count(True)
            if not candidates:
                raise NoWorkerError
            loads = [load if ok else math.inf for load, ok in zip(loads, up, strict=True)]
        fewest = min(loads)
        start = self._next
        worker = loads.index(fewest, start) if fewest in loads[start:] else loads.index(fewest)
        self._next = worker + 1
        return Decision(worker, float(fewest), candidates, reason)


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
        raise _sizes(in_flight, usable)
    # By identity: comparing types takes as long as a decision of the kernel.
    if in_flight.dtype is not _INT32 or not in_flight.flags.carray:
        in_flight = np.array(in_flight, _INT32)
    if usable.dtype is not _BOOL or not usable.flags.carray:
        usable = np.array(usable, _BOOL)
    return in_flight, usable


def _sizes(in_flight: NDArray[np.int32], usable: NDArray[np.bool_]) -> ValueError:
    return ValueError(f"in_flight is {in_flight.shape} and usable {usable.shape}, expected [W] both")
