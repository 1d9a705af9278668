"""Routing by the label that the client gives its request. Looks at no experts; labels come from the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from eldrd.routing.load import ShortestQueue
from eldrd.routing.policy import Decision, Policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

DOMAIN: Final = "domain"
NO_LABEL: Final = "no_label"
LABEL_UNKNOWN: Final = "label_unknown"
DOMAIN_DOWN: Final = "domain_down"


class Domain(Policy):
    """The workers that own the request's label; of those the one with the fewest requests in flight. Source: the oracle
    that ELDR (arXiv 2607.00466) compares itself with.

    Falls back to jsq over all workers, with the reason on the decision: no_label; label_unknown; domain_down (none of
    the label's workers is usable).
    """

    name: ClassVar[str] = "domain"

    def __init__(self, workers: Sequence[str], labels: Mapping[str, Sequence[str]]) -> None:
        """workers: names in row order; labels: names of the workers of each label. Raises ValueError for a label with
        no worker or an unknown one."""
        self._rows: dict[str, NDArray[np.bool_]] = {}
        self._queues: dict[str, ShortestQueue] = {}
        self._fallback = ShortestQueue()
        for label, names in labels.items():
            if unknown := sorted(set(names) - set(workers)):
                raise ValueError(f"label {label!r} has workers the fleet lacks: {', '.join(unknown)}")
            if not names:
                raise ValueError(f"label {label!r} has no workers")
            self._rows[label] = np.array([w in names for w in workers], np.bool_)
            self._queues[label] = ShortestQueue()

    def choose(
        self,
        in_flight: NDArray[np.int32],
        usable: NDArray[np.bool_],
        counts: NDArray[np.int32] | None,
        tokens: int = 0,
        label: str | None = None,
    ) -> Decision:
        """See Policy; counts are not read."""
        del counts, tokens
        if label is None:
            return self._fallback.choose_because(NO_LABEL, in_flight, usable)
        rows = self._rows.get(label)
        if rows is None:
            return self._fallback.choose_because(LABEL_UNKNOWN, in_flight, usable)
        mine = usable & rows
        if not mine.any():
            return self._fallback.choose_because(DOMAIN_DOWN, in_flight, usable)
        return self._queues[label].choose_because(DOMAIN, in_flight, mine)
