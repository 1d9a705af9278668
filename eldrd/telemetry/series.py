"""Counters and histograms that cost a request next to nothing, read by prometheus_client at a scrape. No metric is named here.

A request touches a dozen of them, and prometheus_client's own take a lock, check and walk over the buckets each time. These
do none of that: they belong to the loop's thread, which also scrapes. Whoever works in another thread counts after it has
come back. Source: the custom collectors of prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from time import time
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry


class Count:
    """One series of a counter."""

    __slots__ = ("created", "value")
    type = "counter"

    def __init__(self) -> None:
        self.value = 0.0
        self.created = time()

    def inc(self, amount: float = 1.0) -> None:
        """amount: not negative."""
        self.value += amount

    def samples(self) -> Iterable[tuple[str, dict[str, str], float]]:
        """Suffix of the name, labels beside the series' own, value."""
        yield "_total", {}, self.value
        yield "_created", {}, self.created


class Distribution:
    """One series of a histogram. bounds: the buckets' upper bounds, ascending, without infinity."""

    __slots__ = ("_bounds", "_counts", "_created", "_total")
    type = "histogram"

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._created = time()

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def samples(self) -> Iterable[tuple[str, dict[str, str], float]]:
        """Suffix of the name, labels beside the series' own, value."""
        bounds = (*self._bounds, float("inf"))
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield "_bucket", {"le": floatToGoString(bound)}, count  # type: ignore[no-untyped-call]
        yield "_count", {}, sum(self._counts)
        yield "_sum", {}, self._total
        yield "_created", {}, self._created


_C = TypeVar("_C", bound=Count | Distribution)


class Family(Collector, Generic[_C]):
    """All series of one name by their label values; a child is found by one lookup."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], new: Callable[[], _C], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._new = new
        self._series: dict[tuple[str, ...], _C] = {}
        # By the values as they were given: 200 and "200" are one series.
        self._found: dict[tuple[str | int, ...], _C] = {}
        registry.register(self)

    def labels(self, *values: str | int) -> _C:
        """The child of these values, in the labels' order. Raises ValueError for too few or too many."""
        try:
            return self._found[values]
        except KeyError:
            return self._added(values)

    def _added(self, values: tuple[str | int, ...]) -> _C:
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)} of them")
        texts = tuple(map(str, values))
        if texts not in self._series:
            self._series[texts] = self._new()
        child = self._found[values] = self._series[texts]
        return child

    def keep(self, position: int, allowed: frozenset[str]) -> None:
        """Drop the children whose label at ``position`` is none of these."""
        for texts in [t for t in self._series if t[position] not in allowed]:
            del self._series[texts]
        for values in [v for v in self._found if str(v[position]) not in allowed]:
            del self._found[values]

    def describe(self) -> Iterable[Metric]:
        """What the registry checks for names used twice."""
        return [Metric(self._name, self._text, self._new().type)]

    def collect(self) -> Iterable[Metric]:
        family = Metric(self._name, self._text, self._new().type)
        for values, child in self._series.items():
            own = dict(zip(self._labels, values, strict=True))
            for suffix, more, value in child.samples():
                family.add_sample(self._name + suffix, {**own, **more}, value)
        return [family]


def counters(name: str, text: str, labels: tuple[str, ...], registry: CollectorRegistry) -> Family[Count]:
    """Counters; ``_total`` is added to the name."""
    return Family(name, text, labels, Count, registry)


def histograms(
    name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...], registry: CollectorRegistry
) -> Family[Distribution]:
    """Histograms; buckets: upper bounds, ascending, without infinity. Raises ValueError for others."""
    bounds = tuple(map(float, buckets))
    if not bounds or list(bounds) != sorted(bounds) or bounds[-1] == float("inf"):
        raise ValueError(f"buckets are {buckets}, expected ascending finite bounds")
    return Family(name, text, labels, lambda: Distribution(bounds), registry)
