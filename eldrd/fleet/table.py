"""Load table and leases: who has how many requests in flight and who is usable. Chooses nobody, probes nobody.

The table's arrays are what the policies' Numba kernels read; a worker's slot in them stays the same for its lifetime.
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
        table.in_flight[worker.slot] += 1

    def end(self) -> None:
        if self._open:
            self._open = False
            self._table._ended(self.worker)


class LoadTable:
    """in_flight: int32 [capacity], requests under way per slot; usable: bool [capacity]."""

    def __init__(self, capacity: int = 64) -> None:
        self.in_flight: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.usable: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._workers: list[Worker | None] = [None] * capacity

    def add(self, worker: Worker) -> int:
        """Give a worker its slot."""
        if None not in self._workers:
            grown = len(self._workers)
            self.in_flight = np.concatenate([self.in_flight, np.zeros(grown, np.int32)])
            self.usable = np.concatenate([self.usable, np.zeros(grown, np.bool_)])
            self._workers += [None] * grown
        slot = self._workers.index(None)
        self._workers[slot] = worker
        self.in_flight[slot] = 0
        self.usable[slot] = False
        return slot

    def remove(self, worker: Worker) -> None:
        """No new requests for the worker; its slot is free when its last lease has ended."""
        worker.removed = True
        self.usable[worker.slot] = False
        self._free(worker)

    def lease(self, worker: Worker) -> Lease:
        return Lease(self, worker)

    def _ended(self, worker: Worker) -> None:
        self.in_flight[worker.slot] -= 1
        if worker.removed:
            self._free(worker)

    def _free(self, worker: Worker) -> None:
        if self.in_flight[worker.slot] == 0 and self._workers[worker.slot] is worker:
            self._workers[worker.slot] = None


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
