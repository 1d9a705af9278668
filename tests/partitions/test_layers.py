"""The greedy layer mask against a slow version that ranks concatenated layers with scipy."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from scipy.stats import spearmanr

from eldrd.partitions import layers


def slow_rho(x: np.ndarray, chosen: list[int], wanted: np.ndarray, pairs: np.ndarray) -> float:
    rows = x[:, chosen].reshape(len(x), -1).astype(np.float64)
    return float(spearmanr([cosine(rows[i], rows[j]) for i, j in pairs], wanted).statistic)


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 9), st.integers(1, 4), st.integers(0, 999))
def test_trace_is_the_greedy_search(n: int, total: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.random((n, total, 5), np.float32)
    pairs = np.array(list(combinations(range(n), 2)))
    wanted = rng.random(len(pairs))
    trace = layers.greedy(x, wanted, pairs, beyond_peak=True)
    assert sorted(trace.layers) == list(range(total))
    for step in range(total):
        before = list(trace.layers[:step])
        best = max(slow_rho(x, [*before, layer], wanted, pairs) for layer in range(total) if layer not in before)
        assert trace.rho[step] == pytest.approx(best, abs=1e-3)
        assert slow_rho(x, list(trace.layers[: step + 1]), wanted, pairs) == pytest.approx(best, abs=1e-3)
    short = layers.greedy(x, wanted, pairs)
    assert short.layers == trace.layers[: len(short.layers)]
    assert short.mask.tolist() == trace.mask.tolist() == sorted(short.layers)


def test_mask_stops_at_the_first_peak() -> None:
    assert layers.Trace((3, 1, 0, 2), (0.5, 0.6, 0.55, 0.9)).mask.tolist() == [1, 3]
    assert layers.Trace((2,), (0.0,)).mask.tolist() == [2]


def test_ties_get_their_mean_rank() -> None:
    x = np.array([[[1, 0]], [[1, 0]], [[0, 1]], [[0, 0]]], np.float32)
    pairs = np.array(list(combinations(range(4), 2)))
    wanted = np.array([0.1, 0.9, 0.9, 0.4, 0.5, 0.9])
    expected = spearmanr([0, 1, 1, 1, 1, 1], wanted).statistic
    assert layers.greedy(x, wanted, pairs).rho[0] == pytest.approx(expected)


def test_constant_distances_are_worth_nothing() -> None:
    x = np.ones((4, 2, 3), np.float32)
    pairs = np.array(list(combinations(range(4), 2)))
    assert layers.greedy(x, np.arange(6.0), pairs).rho == (0.0,)
