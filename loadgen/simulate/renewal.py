"""Online refit in virtual time: what eldrd.partitions.refitter does by the clock. Fits nothing itself, routes nothing."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from eldrd.partitions.refit import refit

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition
    from eldrd.routing.policy import Policy

# The defaults of [refit] but for the pause between two, which is the daemon's CPU and here the simulation's length.
WINDOW_S: Final = 30.0
EVERY_S: Final = 10.0
REQUESTS: Final = 200
LATEST: Final = 600


class Renewal:
    """The ``renewed`` of Fleet.run: a partition refitted to the last requests every ten seconds. build: the policy over
    a partition, which takes over from the one before."""

    def __init__(self, partition: Partition, policy: Policy, build: Callable[[Partition, Policy], Policy]) -> None:
        self._partition, self._policy, self._build = partition, policy, build
        self._window: deque[tuple[float, NDArray[np.int32]]] = deque(maxlen=LATEST)
        self._next = EVERY_S

    def __call__(self, now: float, counts: NDArray[np.int32]) -> Policy | None:
        self._window.append((now, counts.reshape(-1)))
        if now < self._next:
            return None
        self._next = now + EVERY_S
        while self._window[0][0] < now - WINDOW_S:
            self._window.popleft()
        if len(self._window) < REQUESTS:
            return None
        found = refit(self._partition, [row for _, row in self._window])
        if found is None:
            return None
        self._partition = found.partition
        self._policy = self._build(found.partition, self._policy)
        return self._policy
