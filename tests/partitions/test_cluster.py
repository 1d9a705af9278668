"""Balanced clustering against scipy's assignment, brute force and plain definitions."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from eldrd.partitions import cluster


def seats(similarity: np.ndarray) -> float:
    """The best balanced sum, as an assignment problem of rows to the clusters' single seats."""
    n, k = similarity.shape
    cap = -(-n // k)
    cost = np.zeros((k * cap, k * cap))
    cost[:n] = np.repeat(-similarity, cap, axis=1)
    cost[n:] = 1e6  # who fills the seats too many may sit only in a cluster's last one
    cost[n:, cap - 1 :: cap] = 0
    rows, columns = linear_sum_assignment(cost)
    return -float(cost[rows, columns][rows < n].sum())


def unit_rows(n: int, d: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).random((n, d), np.float32) ** 3
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 999), st.sampled_from([1, 3, 1000]))
def test_assignment_is_the_best_balanced_one(k: int, extra: int, seed: int, values: int) -> None:
    """Also with many ties (few distinct values), where chains of moves could go round in circles."""
    n = k + extra
    similarity = np.random.default_rng(seed).integers(-values, values + 1, (n, k)) / values
    got = cluster.balanced_assignment(similarity)
    assert set(np.bincount(got, minlength=k)) <= {n // k, -(-n // k)}
    assert similarity[np.arange(n), got].sum() == pytest.approx(seats(similarity), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 5), st.integers(0, 99))
def test_assignment_of_few_against_all_there_are(k: int, extra: int, seed: int) -> None:
    n = k + extra
    similarity = np.random.default_rng(seed).random((n, k), np.float32)
    got = cluster.balanced_assignment(similarity)
    allowed = {n // k, -(-n // k)}
    best = max(
        sum(float(similarity[i, c]) for i, c in enumerate(assignment))
        for assignment in product(range(k), repeat=n)
        if {assignment.count(c) for c in range(k)} <= allowed
    )
    assert float(similarity[np.arange(n), got].sum()) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize(("n", "sizes"), [(4, [1, 1, 2]), (7, [2, 2, 3]), (6, [2, 2, 2])])
def test_a_cluster_nobody_likes_gets_its_share(n: int, sizes: list[int]) -> None:
    similarity = np.ones((n, 3), np.float32)
    similarity[:, 1] = 0
    got = np.bincount(cluster.balanced_assignment(similarity), minlength=3)
    assert sorted(got) == sizes
    assert got[1] == n // 3


def test_no_rows_and_odd_values() -> None:
    assert cluster.balanced_assignment(np.zeros((0, 3))).size == 0
    assert sorted(cluster.balanced_assignment(np.ones((2, 4))).tolist()) in (
        [0, 1],
        [0, 2],
        [1, 2],
        [0, 3],
        [1, 3],
        [2, 3],
    )
    with pytest.raises(ValueError, match="must be finite"):
        cluster.balanced_assignment(np.full((2, 2), np.nan))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 99))
def test_kmeans_ends_where_neither_step_helps(k: int, extra: int, seed: int) -> None:
    x = unit_rows(k + extra, 5, seed)
    start = cluster.seeds(x, k, np.random.default_rng(seed))
    first = x @ start.T
    found = cluster.kmeans(x, start)
    own = first[np.arange(len(x)), cluster.balanced_assignment(first)].mean()
    assert found.objective >= own - 1e-6
    assert found.objective == pytest.approx(float((x * found.centroids[found.assignment]).sum(1).mean()), rel=1e-5)
    for c in range(k):
        mean = x[found.assignment == c].sum(axis=0)
        np.testing.assert_allclose(found.centroids[c], mean / np.linalg.norm(mean), rtol=1e-4)
    assert (x @ found.centroids.T)[np.arange(len(x)), found.assignment].sum() == pytest.approx(
        seats((x @ found.centroids.T).astype(np.float64)), rel=1e-5
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 300), st.integers(0, 99))
def test_seeds_are_distinct_rows(k: int, extra: int, seed: int) -> None:
    x = unit_rows(k + extra, 4, seed)
    chosen = cluster.seeds(x, k, np.random.default_rng(seed))
    rows = [tuple(r) for r in x.tolist()]
    assert {tuple(r) for r in chosen.tolist()} <= set(rows)
    assert len({tuple(r) for r in chosen.tolist()}) == k


def test_seeds_of_doubles() -> None:
    x = np.repeat(unit_rows(1, 4, 0), 5, axis=0)
    assert cluster.seeds(x, 3, np.random.default_rng(0)).shape == (3, 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 4)), max_size=40))
def test_alignment_keeps_as_many_as_can_be(k: int, pairs: list[tuple[int, int]]) -> None:
    old = np.array([a if a < k else -1 for a, _ in pairs], np.int64)
    new = np.array([b % k for _, b in pairs], np.int64)
    centroids = np.arange(k, dtype=np.float32)[:, None]
    got = cluster.aligned(cluster.Clustering(1.0, centroids, new), old)
    best = max(int(np.sum(np.array(p)[new] == old)) for p in permutations(range(k)))
    assert int(np.sum(got.assignment == old)) == best
    # Every row is still with the same others, and with their centroid.
    assert got.centroids[got.assignment, 0].tolist() == centroids[new, 0].tolist()
