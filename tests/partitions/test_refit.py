"""Online refit: what it improves and whom it moves, and how a partition adapts to workers that come and go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.partitions.cluster import balanced_assignment
from eldrd.partitions.file import Partition, mismatches
from eldrd.partitions.refit import WORTH, adapt, continues, refit
from eldrd.partitions.transform import units
from eldrd.signatures.geometry import Geometry

LAYERS, EXPERTS = 3, 16
GEOMETRY = Geometry("m", 9, tuple(range(LAYERS)), EXPERTS, 2, 16)
WIDTH = LAYERS * EXPERTS


def partition(k: int, seed: int = 0) -> Partition:
    rng = np.random.default_rng(seed)
    centroids = rng.random((k, 2 * EXPERTS)).astype(np.float32)
    return Partition(
        centroids=centroids / np.linalg.norm(centroids, axis=1, keepdims=True),
        idf=rng.random((LAYERS, EXPERTS)).astype(np.float32),
        layers=np.array([0, 2], np.int32),
        workers=tuple(f"d{i}" for i in range(k)),
        geometry=GEOMETRY,
        tau=0.1,
        requests=10 * k,
        rho=None,
        cluster_sizes=(10,) * k,
        created="2026-01-01T00:00:00+00:00",
    )


def traffic(n: int, domains: int, seed: int, topics: float = 0.0) -> tuple[list[np.ndarray], np.ndarray]:
    """Counts int32 [L * E] of n requests and the domain of each. topics: share of a request's taste that is its own."""
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(EXPERTS, 0.15), (domains, LAYERS))
    which = rng.integers(0, domains, n)
    own = rng.dirichlet(np.full(EXPERTS, 0.15), (n, LAYERS)) if topics else np.zeros((n, LAYERS, EXPERTS))
    mixed = (1 - topics) * taste[which] + topics * own
    return [rng.poisson(m * 60).astype(np.int32).reshape(-1) for m in mixed], which


def objective(p: Partition, rows: list[np.ndarray]) -> float:
    scores = units(np.array(rows).reshape(-1, LAYERS, EXPERTS), p.idf, p.layers) @ p.centroids.T
    return float(scores[np.arange(len(rows)), balanced_assignment(scores)].mean())


def nearest(p: Partition, rows: list[np.ndarray]) -> np.ndarray:
    scores = units(np.array(rows).reshape(-1, LAYERS, EXPERTS), p.idf, p.layers) @ p.centroids.T
    return np.asarray(scores.argmax(axis=1))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(6, 60), st.integers(0, 99))
def test_is_better_on_requests_it_has_not_seen_or_nothing(k: int, n: int, seed: int) -> None:
    old = partition(k, seed)
    rows, _ = traffic(n, 4, seed)
    found = refit(old, rows, seed)
    if found is None:
        return
    assert found.after > found.before * (1 + WORTH)
    assert objective(found.partition, rows) > objective(old, rows)
    assert found.moved == pytest.approx(float((nearest(old, rows) != nearest(found.partition, rows)).mean()))
    assert set(found.partition.cluster_sizes) <= {n // k, -(-n // k)}
    assert found.requests == n == found.partition.requests
    assert mismatches(found.partition, old.workers, GEOMETRY) == []
    assert (found.partition.idf is old.idf, found.partition.layers is old.layers) == (True, True)


def test_the_same_traffic_moves_nobody_however_often_it_is_looked_at() -> None:
    """Every window has centroids of its own that fit it better than any others, and the next one worse."""
    rows, _ = traffic(4000, 6, 4, topics=0.3)
    windows = [rows[i : i + 200] for i in range(0, 4000, 200)]
    settled = refit(partition(4), [r for w in windows[:10] for r in w])
    assert settled is not None
    found = [refit(settled.partition, w, seed) for seed, w in enumerate(windows[10:])]
    assert found == [None] * 10


def test_settles_and_then_keeps_what_it_has() -> None:
    rows, which = traffic(200, 4, 1)
    first = refit(partition(4), rows)
    assert first is not None
    homes = nearest(first.partition, rows)
    assert all(len(set(homes[which == d])) == 1 for d in range(4))
    assert refit(first.partition, rows, seed=3) is None


def test_drift_moves_only_the_domain_that_changed() -> None:
    """One of four domains gives way to another: the three keep their workers."""
    rows, which = traffic(400, 4, 1)
    settled = refit(partition(4), rows)
    assert settled is not None
    other, _ = traffic(100, 1, 55)
    now = [r for r, d in zip(rows, which, strict=True) if d != 3] + other
    found = refit(settled.partition, now)
    assert found is not None
    rest = [r for r, d in zip(rows, which, strict=True) if d != 3]
    assert (nearest(found.partition, rest) == nearest(settled.partition, rest)).mean() > 0.9
    assert len(set(nearest(found.partition, other).tolist())) == 1


def test_too_few_requests_with_weight() -> None:
    zero = [np.zeros(WIDTH, np.int32)] * 50
    assert refit(partition(3), zero) is None
    assert refit(partition(3), [*zero, *traffic(2, 1, 0)[0]]) is None


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True), st.integers(1, 6), st.integers(0, 9))
def test_adapts_to_any_workers(numbers: list[int], k: int, seed: int) -> None:
    old = partition(k, seed)
    workers = [f"d{i}" for i in numbers]
    new = adapt(old, workers)
    known = [w for w in workers if w in old.workers]
    if not known:
        assert new is None
        return
    assert new is not None
    assert mismatches(new, workers, GEOMETRY) == []
    assert new.workers == tuple(workers)
    assert sum(new.cluster_sizes) == new.requests == 10 * len(known)
    for row, worker in enumerate(workers):
        if worker in old.workers:
            assert new.centroids[row].tolist() == old.centroids[old.workers.index(worker)].tolist()
        else:
            assert new.centroids[row].tolist() in [old.centroids[old.workers.index(w)].tolist() for w in known]


def test_joining_moves_half_of_the_largest_cluster() -> None:
    old = replace(partition(3), cluster_sizes=(10, 40, 16), requests=66)
    new = adapt(old, ["d0", "d1", "d2", "x", "y"])
    assert new is not None
    assert new.cluster_sizes == (10, 10, 16, 20, 10)
    rows, _ = traffic(60, 4, 2)
    # Nobody but d1 shares: whom the others had, they still have.
    before, after = nearest(old, rows), nearest(new, rows)
    assert (after == before).all()  # ties go to the lower row; the band takes both
    assert new.centroids[[3, 4]].tolist() == new.centroids[[1, 1]].tolist()


def test_leaving_moves_only_who_was_there() -> None:
    old = partition(4)
    new = adapt(old, ["d3", "d0", "d2"])
    assert new is not None
    rows, _ = traffic(80, 5, 3)
    before = [old.workers[i] for i in nearest(old, rows)]
    after = [new.workers[i] for i in nearest(new, rows)]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != "d1")


def test_a_joined_worker_gets_its_own_after_a_refit() -> None:
    rows, which = traffic(400, 4, 1)
    three = refit(partition(3), rows)
    assert three is not None
    four = adapt(three.partition, ["d0", "d1", "d2", "d3"])
    assert four is not None
    found = refit(four, rows)
    assert found is not None
    homes = nearest(found.partition, rows)
    assert sorted(np.bincount(homes, minlength=4)) == sorted(np.bincount(which, minlength=4))


def test_a_state_continues_its_own_file_only() -> None:
    base = partition(3)
    state = replace(base, created="2026-01-02T00:00:00+00:00", workers=("a", "b", "c"))
    assert continues(state, base)
    assert continues(base, base)
    assert not continues(replace(state, created="2025-12-31T23:59:59+00:00"), base)
    assert not continues(replace(state, idf=base.idf + 1), base)
    assert not continues(replace(state, layers=np.array([1, 2], np.int32)), base)
    assert not continues(replace(state, geometry=replace(GEOMETRY, fingerprint=8)), base)
