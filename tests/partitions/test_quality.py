"""Quality figures against slow, obvious versions."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from scipy.stats import spearmanr

from eldrd.partitions import quality
from eldrd.partitions.file import Partition
from eldrd.signatures.capture import Capture
from eldrd.signatures.geometry import Geometry


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(1, 500), st.integers(0, 9))
def test_pairs_are_distinct_and_ordered(n: int, limit: int, seed: int) -> None:
    pairs = [tuple(p) for p in quality.sample_pairs(n, seed, limit).tolist()]
    everything = set(combinations(range(n), 2))
    assert len(pairs) == len(set(pairs)) == min(limit, len(everything))
    assert set(pairs) <= everything


def test_pairs_of_many_requests_stay_in_range() -> None:
    i, j = quality.sample_pairs(200_000, 0, 5_000).T
    assert (i >= 0).all()
    assert (i < j).all()
    assert (j < 200_000).all()


def test_rho_is_spearman_of_cosine_distances() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((30, 5)), rng.random((30, 7))
    pairs = list(combinations(range(30), 2))
    expected = spearmanr([cosine(a[i], a[j]) for i, j in pairs], [cosine(b[i], b[j]) for i, j in pairs]).statistic
    assert quality.rho(a, b) == pytest.approx(expected)
    assert quality.rho(a, a) == pytest.approx(1)
    assert quality.rho(np.ones((4, 2)), a[:4]) is None
    assert quality.rho(a[:1], a[:1]) is None


def test_zero_rows_are_at_distance_one() -> None:
    x = np.array([[0, 0], [1, 0], [2, 0]])
    assert quality.cosine_distances(x, np.array([[0, 1], [1, 2]])).tolist() == [1, 0]


def test_purity() -> None:
    labels = ["a", "a", "b", None, "b", "c"]
    assert quality.purity(labels, np.array([0, 0, 0, 0, 1, 1])) == pytest.approx(3 / 5)
    assert quality.purity(labels, np.array([0, 0, 1, 5, 1, 2])) == 1
    assert quality.purity([None], np.array([0])) is None


def test_report() -> None:
    geometry = Geometry("m", 1, (0,), 3, 1, 16)
    partition = Partition(
        centroids=np.eye(3, dtype=np.float32)[:2],
        idf=np.ones((1, 3), np.float32),
        layers=np.array([0], np.int32),
        workers=("d0", "d1"),
        geometry=geometry,
        tau=0.1,
        requests=3,
        rho=0.5,
        cluster_sizes=(2, 1),
        created="",
    )
    counts = np.array([[[9, 0, 0]], [[4, 3, 0]], [[5, 5, 0]], [[0, 2, 0]]], np.int32)
    ones = np.ones(4, np.int32)
    capture = Capture(geometry, counts, ones, ones, ["a", "a", "b", "b"])
    assert quality.report(partition, capture) == {
        "requests": 4,
        "layers": 1,
        "layers_total": 1,
        "cluster_sizes": {"d0": 3, "d1": 1},
        "fit_sizes": {"d0": 2, "d1": 1},
        "labels": {"d0": {"a": 2, "b": 1}, "d1": {"b": 1}},
        "imbalance": 1.5,
        "own": pytest.approx((1 + 0.8 + 0.5**0.5 + 1) / 4),
        "second": pytest.approx((0 + 0.6 + 0.5**0.5 + 0) / 4),
        "in_band": 1.25,
        "rho": 0.5,
        "purity": 0.75,
    }
    with pytest.raises(ValueError, match=r"\(1, 4\), the partition \(1, 3\)"):
        quality.report(partition, Capture(Geometry("m", 1, (0,), 4, 1, 16), counts, ones, ones, [None] * 4))
