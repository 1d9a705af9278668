"""Counters and histograms of our own against prometheus_client's: the same page for the same operations."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from eldrd.telemetry.series import counters, histograms

BUCKETS = (0.005, 0.1, 1, 2.5, 300)

label = st.sampled_from(["a", 'quo"te', "line\nbreak", "", "200", 200])
amount = st.one_of(
    st.floats(0, 1e9), st.integers(0, 1000), st.sampled_from([*BUCKETS, 0.005000000001, 0.00499999, float("inf")])
)
operation = st.tuples(st.sampled_from(["count", "observe", "plain_count", "plain_observe"]), label, label, amount)


def page(registry: CollectorRegistry) -> str:
    """The exposition but for the times at which series began."""
    return re.sub(r"(_created(?:\{.*\})?) 1\.\d+e\+09", r"\1 T", generate_latest(registry).decode())


@given(st.lists(operation, max_size=40), st.sets(label))
def test_same_page(operations: list[tuple[str, str | int, str | int, float]], kept: set[str | int]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = ("x", "y")
    own = counters("a_things", "Things, \\ and\nmore.", labels, ours)
    own_plain = counters("a_plain", "Plain.", (), ours).labels()
    own_times = histograms("a_times", "Times.", labels, BUCKETS, ours)
    own_plain_times = histograms("a_plain_times", "Times.", (), BUCKETS, ours).labels()
    other = Counter("a_things", "Things, \\ and\nmore.", labels, registry=theirs)
    other_plain = Counter("a_plain", "Plain.", registry=theirs)
    other_times = Histogram("a_times", "Times.", labels, buckets=BUCKETS, registry=theirs)
    other_plain_times = Histogram("a_plain_times", "Times.", buckets=BUCKETS, registry=theirs)
    for kind, x, y, value in operations:
        match kind:
            case "count":
                own.labels(x, y).inc(value)
                other.labels(x, y).inc(value)
            case "observe":
                own_times.labels(x, y).observe(value)
                other_times.labels(x, y).observe(value)
            case "plain_count":
                own_plain.inc()
                other_plain.inc()
            case _:
                own_plain_times.observe(value)
                other_plain_times.observe(value)
    assert page(ours) == page(theirs)
    names = frozenset(map(str, kept))
    own.keep(1, names)
    for x, y in {(str(x), str(y)) for kind, x, y, _ in operations if kind == "count" and str(y) not in names}:
        other.remove(x, y)
    assert page(ours) == page(theirs)
    own.labels("a", 200).inc()
    other.labels("a", 200).inc()
    assert page(ours) == page(theirs)


def test_created_is_the_time_of_the_first_use() -> None:
    registry = CollectorRegistry()
    counters("a_things", "Things.", (), registry).labels()
    (seen,) = re.findall(r"^a_things_created (.*)$", generate_latest(registry).decode(), re.MULTILINE)
    assert float(seen) > 1e9


def test_a_name_is_used_once() -> None:
    registry = CollectorRegistry()
    counters("a_things", "Things.", (), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        counters("a_things", "Things.", (), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Gauge("a_things_total", "Things.", registry=registry)


def test_what_is_wrong_is_refused() -> None:
    registry = CollectorRegistry()
    family = counters("a_things", "Things.", ("x",), registry)
    for values in ((), ("a", "b")):
        with pytest.raises(ValueError, match="labels"):
            family.labels(*values)
    for buckets in ((), (2.0, 1.0), (1.0, float("inf"))):
        with pytest.raises(ValueError, match="buckets"):
            histograms("a_times", "Times.", (), buckets, registry)
