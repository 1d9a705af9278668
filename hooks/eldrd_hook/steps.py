"""What an engine's decode steps read of the model: totals of steps, requests, tokens and active experts. NumPy only: no
vLLM, no I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eldrd_hook import wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Expert ids marked in one go: the working set stays in the processor's cache, and no call holds the interpreter for long.
_TOGETHER = 1 << 15


def active_experts(ids: NDArray[np.signedinteger], experts: int) -> int | None:
    """Distinct experts that tokens select, summed over layers.

    ids: expert ids [tokens, L, k]. None if one of them is no expert: a layer did not report.
    """
    tokens, layers, k = ids.shape
    lanes = (np.arange(layers, dtype=np.int64) * experts)[None, :, None]
    chosen = np.zeros(layers * experts, np.bool_)
    group = max(1, _TOGETHER // (layers * k))
    for at in range(0, tokens, group):
        part = ids[at : at + group]
        if part.min() < 0 or part.max() >= experts:
            return None
        chosen[(part + lanes).ravel()] = True
    return int(np.count_nonzero(chosen))


class Meter:
    """Totals over steps that decode. The weights that a step reads are those of the experts that any of its tokens
    selects, so that all its tokens count, those of a prompt that is prefilled beside them too."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._steps = self._requests = self._tokens = self._active = self._missed = 0
        self.news = False
        """Whether a step has come since the last ``totals``."""

    def count(self, requests: int, tokens: int, ids: NDArray[np.signedinteger] | None) -> None:
        """One step. ids: expert ids [at least tokens, L, k], the step's tokens first; None: the capture was lost."""
        self.news = True
        active = None if ids is None or len(ids) < tokens else active_experts(ids[:tokens], self._experts)
        if active is None:
            self._missed += 1
            return
        self._steps += 1
        self._requests += requests
        self._tokens += tokens
        self._active += active

    def totals(self) -> wire.Steps:
        """The message of what has been counted so far."""
        self.news = False
        return wire.Steps(wire.VERSION, 0, self._steps, self._requests, self._tokens, self._active, self._missed)
