"""The interface of routing policies: what a policy is given and what it answers. No policy is implemented here.

A policy sees workers as row numbers 0..W-1 in the order of the configuration; the caller keeps the names. It has no
clock: whoever calls it says what time it is, so that it runs in real and in virtual time.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray


class NoWorkerError(LookupError):
    """No worker is usable."""


class Decision(NamedTuple):
    """worker: row chosen; score: the policy's own measure of it (cosine for eldr, in-flight for jsq, milliseconds for
    union); candidates: how many workers the last choice was among; reason: what decided, a short constant for logs and
    metrics."""

    worker: int
    score: float
    candidates: int
    reason: str


class Figure(NamedTuple):
    """A live number of a policy: worker row it concerns, name and term as metric labels allow them."""

    worker: int
    name: str
    value: float


class Policy(Protocol):
    """One way to choose a decode worker. Called on the event loop: microseconds, no I/O, no locks.

    Implementations inherit from it: those that keep no state about running requests need only ``choose``.
    """

    name: ClassVar[str]
    wants_signature: ClassVar[bool] = False

    @abstractmethod
    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """Choose among the rows where ``usable`` is true.

        in_flight: int32 [W], decode requests in flight per worker; usable: bool [W]; counts: int32 [L, E] (or flat,
        where layers do not matter to the policy), the request's expert counts, None where the signature is missing or
        the policy does not want one; tokens: prompt tokens that were counted; label: what the client calls the
        request's domain. Raises NoWorkerError if no row is usable.
        """
        ...

    def admitted(self, worker: int, counts: NDArray[np.int32] | None, tokens: int, now: float) -> object:
        """The request decodes on ``worker`` from now (seconds of any steady clock) on. What is returned is given to
        ``ended``, whatever happens to the request."""
        del worker, counts, tokens, now
        return None

    def ended(self, admission: object, now: float, tpot_s: float | None = None) -> None:
        """The request left its worker; a second call does nothing. tpot_s: its mean seconds a token, where it is known
        over a whole answer."""
        del admission, now, tpot_s

    def figures(self) -> Iterable[Figure]:
        """What the policy believes of its workers, read when metrics are scraped."""
        return ()
