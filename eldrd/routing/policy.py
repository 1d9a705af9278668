"""The interface of routing policies: what a policy is given and what it answers. No policy is implemented here.

A policy sees workers as row numbers 0..W-1 in the order of the configuration; the caller keeps the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class NoWorkerError(LookupError):
    """No worker is usable."""


@dataclass(frozen=True, slots=True)
class Decision:
    """worker: row chosen; score: the policy's own measure of it (cosine for eldr, in-flight for jsq); candidates: how
    many workers the last, load-based choice was among; reason: what decided, a short constant for logs and metrics."""

    worker: int
    score: float
    candidates: int
    reason: str


class Policy(Protocol):
    """One way to choose a decode worker. ``choose`` is called on the event loop: microseconds, no I/O, no locks."""

    name: ClassVar[str]
    wants_signature: ClassVar[bool]

    def choose(
        self, in_flight: NDArray[np.int32], usable: NDArray[np.bool_], counts: NDArray[np.int32] | None
    ) -> Decision:
        """Choose among the rows where ``usable`` is true.

        in_flight: int32 [W], decode requests in flight per worker; usable: bool [W]; counts: int32 [L * E], the
        request's expert counts, None where the signature is missing or the policy does not want one.
        Raises NoWorkerError if no row is usable.
        """
        ...
