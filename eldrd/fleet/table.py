"""Load table and leases: who has how many requests in flight and who is usable. Chooses nobody, probes nobody.

The table's arrays are what the policies' Numba kernels read; a worker's slot in them is its own for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eldrd.fleet.worker import Worker


class Lease:
    """A request's place on a worker; ends exactly once however often ``end`` is called."""

    __slots__ = ("_open", "_table", "worker")

    def __init__(self, table: LoadTable, worker: Worker) -> None:
        self._table = table
        self._open = True
        self.worker = worker
        table.cells[worker.slot] += 1

    def end(self) -> None:
        if self._open:
            self._open = False
            self._table._ended(self.worker)


class LoadTable:
    """in_flight: int32 [capacity], requests under way per slot; usable: bool [capacity]; cells: in_flight's memory, of which
    one number is read and written faster than through the array.

    revision: changes with what any worker serves.

    A slot is never given to a second worker: requests that began before a reload still read the slots of workers that
    it removed, and must find nobody else there. It costs five bytes for each worker that there ever was.
    """

    def __init__(self, capacity: int = 64) -> None:
        self.in_flight: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.usable: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self.cells = self.in_flight.data
        self._given = 0
        self.revision = 0

    def add(self) -> int:
        """A slot for a new worker, which is not usable yet."""
        slot = self._given
        if slot == len(self.usable):
            self.in_flight = np.concatenate([self.in_flight, np.zeros(slot, np.int32)])
            self.cells = self.in_flight.data
            self.usable = np.concatenate([self.usable, np.zeros(slot, np.bool_)])
        self._given += 1
        return slot

    def remove(self, worker: Worker) -> None:
        """No new requests for the worker; its leases end as they would."""
        worker.removed = True
        self.usable[worker.slot] = False

    def lease(self, worker: Worker) -> Lease:
        return Lease(self, worker)

    def _ended(self, worker: Worker) -> None:
        self.cells[worker.slot] -= 1


class Pool:
    """The workers of one role in configuration order: row i of every array a policy sees is ``workers[i]``."""

    __slots__ = ("_slots", "_table", "workers")

    def __init__(self, table: LoadTable, workers: tuple[Worker, ...]) -> None:
        self.workers = workers
        self._table = table
        self._slots = np.array([w.slot for w in workers], np.intp)

    def in_flight(self) -> NDArray[np.int32]:
        """int32 [W]."""
        return self._table.in_flight[self._slots]

    def usable(self) -> NDArray[np.bool_]:
        """bool [W]."""
        return self._table.usable[self._slots]

    def any_usable(self) -> bool:
        return bool(self._table.usable[self._slots].any())
