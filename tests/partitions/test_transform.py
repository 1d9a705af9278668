"""IDF, unit signatures and the compiled scores against the formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.partitions.transform import Scorer, idf, unit_rows, units


def test_idf_follows_the_formula() -> None:
    counts = np.array([[[3, 0, 1]], [[2, 0, 0]], [[1, 0, 5]]], np.int32)
    expected = [[math.log(4 / 4), math.log(4 / 1), math.log(4 / 3)]]
    assert idf(counts).dtype == np.float32
    np.testing.assert_allclose(idf(counts), expected, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5), st.integers(1, 17), st.data())
def test_scores_equal_cosines(seed: int, k: int, total: int, experts: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    layers = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1))), np.int32)
    weights = rng.random((total, experts), np.float32)
    centroids = rng.normal(size=(k, layers.size * experts)).astype(np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    counts = rng.integers(0, 1000, (total, experts), np.int32)

    x = [float(counts[layer, e]) * float(weights[layer, e]) for layer in layers for e in range(experts)]
    norm = math.sqrt(sum(v * v for v in x))
    unit = [v / norm if norm else 0.0 for v in x]
    np.testing.assert_allclose(units(counts[None], weights, layers)[0], unit, atol=1e-5)
    np.testing.assert_allclose(unit_rows([counts.reshape(-1)], weights, layers)[0], unit, atol=1e-5)
    scores = Scorer(centroids, weights, layers)(counts.reshape(-1))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(
        scores, [sum(a * b for a, b in zip(row, unit, strict=True)) for row in centroids.tolist()], atol=1e-5
    )


def test_zero_vectors_stay_zero() -> None:
    weights, layers = np.ones((2, 3), np.float32), np.array([0, 1], np.int32)
    counts = np.zeros((2, 2, 3), np.int32)
    counts[1, 0, 1] = 5
    assert units(counts, weights, layers).tolist() == [[0] * 6, [0, 1, 0, 0, 0, 0]]
    assert Scorer(np.eye(6, dtype=np.float32), weights, layers)(counts[0].reshape(-1)).tolist() == [0] * 6


def test_scorer_takes_other_layouts_and_refuses_other_shapes() -> None:
    weights, layers = np.ones((2, 3), np.float32), np.array([1], np.int32)
    scorer = Scorer(np.asfortranarray(np.eye(3, dtype=np.float32)), weights, layers)
    counts = np.array([[9, 9, 9], [0, 2, 0]])
    frozen = counts.astype(np.int32)
    frozen.flags.writeable = False
    for given_counts in (counts, frozen, frozen.reshape(-1), counts.reshape(-1)):
        assert scorer(given_counts).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="reshape"):
        scorer(np.zeros(5, np.int32))
    with pytest.raises(ValueError, match=r"centroids are \(3, 3\), expected \[K, 6\]"):
        Scorer(np.eye(3, dtype=np.float32), weights, np.array([0, 1], np.int32))
