"""Which prefill worker gets a request: consistent hashing of the prompt's beginning, behind a load gate."""

from __future__ import annotations

import math
from bisect import bisect_right
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from eldrd.routing.load import ShortestQueue
from eldrd.routing.policy import Decision, NoWorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from eldrd.routing.policy import Policy

PREFIX: Final = "prefix"
GATE: Final = "gate"
DOWN: Final = "down"


class PrefillPolicy(Protocol):
    """One way to choose a prefill worker; see routing.policy for rows and arrays."""

    def choose(self, key: bytes, in_flight: NDArray[np.int32], usable: NDArray[np.bool_]) -> Decision:
        """key: the prompt's first bytes. Raises NoWorkerError if no worker is usable."""
        ...


class ByLoad:
    """A load policy for prefill workers: the prompt does not matter."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def choose(self, key: bytes, in_flight: NDArray[np.int32], usable: NDArray[np.bool_]) -> Decision:  # noqa: ARG002
        return self._policy.choose(in_flight, usable, None)


class PrefixHash:
    """Prompts that begin alike go to the worker whose prefix cache knows them. Source: ELDR (arXiv 2607.00466).

    workers: names in row order, the ring depends on nothing else; block_bytes: how much of the prompt is hashed;
    vnodes: points a worker has on the ring; gate: how far above the average load the owner may be.
    """

    def __init__(self, workers: Sequence[str], block_bytes: int = 1024, vnodes: int = 160, gate: float = 1.25) -> None:
        self._block_bytes = block_bytes
        self._gate = gate
        ring = sorted(
            (_hash(f"{worker}#{i}".encode()), row) for row, worker in enumerate(workers) for i in range(vnodes)
        )
        self._points = [point for point, _ in ring]
        self._rows = [row for _, row in ring]
        self._least_loaded = ShortestQueue()
        # The owner of everything, and never above the average.
        self._lonely = len(workers) == 1 and gate >= 1

    def choose(self, key: bytes, in_flight: NDArray[np.int32], usable: NDArray[np.bool_]) -> Decision:
        """The owner of ``key``'s first block_bytes, or the least loaded worker if the owner is above the gate.

        key: the prompt's bytes; in_flight: int32 [W], prefills in flight; usable: bool [W]. The gate is
        ceil(gate * average), this request counted in (as in consistent hashing with bounded loads), so an idle fleet
        never closes it. Reasons: prefix; down (the next usable worker on the ring stands in for the owner); gate.
        score is the chosen worker's in flight. Raises NoWorkerError if no worker is usable.
        """
        up, loads = usable.tolist(), in_flight.tolist()
        if self._lonely and True in up:
            return Decision(0, float(loads[0]), 1, PREFIX)
        count, total = len(up), sum(loads) + 1
        if False in up:
            count = up.count(True)
            if not count:
                raise NoWorkerError
            total = sum([load for load, ok in zip(loads, up, strict=True) if ok]) + 1
        start = bisect_right(self._points, _hash(key[: self._block_bytes]))
        owner = self._rows[start % len(self._rows)]
        reason = PREFIX
        if not up[owner]:
            reason = DOWN
            owner = self._next_usable(start, up)
        if loads[owner] + 1 > math.ceil(self._gate * total / count):
            return self._least_loaded.choose_because(GATE, in_flight, usable)
        return Decision(owner, float(loads[owner]), 1, reason)

    def _next_usable(self, start: int, usable: list[bool]) -> int:
        ring = (self._rows[(start + i) % len(self._rows)] for i in range(len(self._rows)))
        return next(row for row in ring if usable[row])


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())
