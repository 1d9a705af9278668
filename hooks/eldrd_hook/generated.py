"""Experts of one request's generated tokens, summed. NumPy only: no vLLM, no I/O.

Tokens come one a step, so their ids wait and are summed many at a time. The latest stay unsummed: vLLM may compute them
again with another token (a preemption with a step in flight) or run a step past the request's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT = 8
_TOGETHER = 64


class Generated:
    """Sums positions from ``first`` on, in order. A gap or an id that is no expert spoils the request: ``close`` gives
    None, never wrong counts."""

    def __init__(self, first: int, layers: int, experts: int) -> None:
        """first: the prompt's length, the position of the first generated token."""
        self._experts = experts
        self._lanes = (np.arange(layers, dtype=np.int64) * experts)[None, :, None]
        self._first = self._summed = first
        self._waiting: list[NDArray[np.signedinteger]] = []
        self._counts = np.zeros(layers * experts, np.int64)
        self._bad = False

    def take(self, start: int, ids: NDArray[np.signedinteger] | None, stop: int) -> None:
        """Expert ids [n, L, k] of positions [start, stop); None: they are not known."""
        if self._bad:
            return
        following = self._summed + len(self._waiting)
        if ids is None or start > following:
            self._bad = stop > self._summed
            return
        for position in range(max(start, self._summed), stop):
            row = ids[position - start]
            if position < following:
                self._waiting[position - self._summed] = row
            else:
                self._waiting.append(row)
        if len(self._waiting) >= _KEPT + _TOGETHER:
            self._sum(len(self._waiting) - _KEPT)

    def close(self, tokens: int) -> NDArray[np.int64] | None:
        """Counts [L * E] of the first ``tokens`` generated tokens, None if they were not all counted."""
        rest = self._first + tokens - self._summed
        if self._bad or not 0 <= rest <= len(self._waiting):
            return None
        if rest:
            self._sum(rest)
        return None if self._bad else self._counts

    def _sum(self, n: int) -> None:
        ids = np.stack(self._waiting[:n])
        del self._waiting[:n]
        self._summed += n
        if ids.min() < 0 or ids.max() >= self._experts:
            self._bad = True
            return
        self._counts += np.bincount((ids + self._lanes).ravel(), minlength=len(self._counts))
