"""Placement of experts on ranks: whole, never worse than chance, and active experts against sampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.partitions import placement


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(0, 99))
def test_every_expert_has_one_seat(k: int, layers: int, ranks: int, seats: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 20, (k * 3, layers, ranks * seats), np.int32)
    placed = placement.place(counts, np.arange(k * 3) % k, k, 1, ranks, seed)
    assert placed.experts.shape == (k, layers, ranks * seats)
    assert (np.sort(placed.experts, axis=2) == np.arange(ranks * seats)).all()
    assert 1 - 1e-5 <= placed.balance_after <= ranks + 1e-5


def test_hot_neighbours_are_spread() -> None:
    """Two clusters, each with its hot experts side by side on one rank."""
    rng = np.random.default_rng(0)
    cluster = np.arange(40) % 2
    hot = np.where(np.arange(16) // 4 == cluster[:, None] * 2, 5.0, 0.05)
    counts = rng.poisson(np.repeat(hot[:, None], 3, axis=1) * 20).astype(np.int32)
    placed = placement.place(counts, cluster, 2, 2, 4, 0)
    assert placed.balance_before > 1.5
    assert placed.balance_after < 1.15
    for k, hottest in ((0, {0, 1, 2, 3}), (1, {8, 9, 10, 11})):
        for row in placed.experts[k].reshape(3, 4, 4):
            assert [len(hottest & set(rank.tolist())) for rank in row] == [1, 1, 1, 1]


def test_frequencies_and_active_experts() -> None:
    counts = np.array([[[4, 4, 0], [8, 0, 0]], [[0, 0, 0], [2, 2, 4]]], np.int32)
    p = placement.frequencies(counts, 2)
    assert p[0, 0].tolist() == [np.float32(0.98), np.float32(0.98), 0]
    assert p[1, 0].tolist() == [0, 0, 0]
    assert p[1, 1].tolist() == [0.5, 0.5, np.float32(0.98)]
    rng = np.random.default_rng(0)
    q = rng.random((5, 2, 6)).astype(np.float32) * 0.5
    sampled = (rng.random((20_000, 5, 2, 6)) < q).any(axis=1).mean(axis=0)
    np.testing.assert_allclose(placement.expected_active(q), sampled, atol=0.02)


def test_imbalance() -> None:
    assert placement.imbalance(np.array([[1, 1, 0, 0]], np.float32), 2) == 2
    assert placement.imbalance(np.array([[1, 0, 0, 1], [0, 0, 0, 0]], np.float32), 2) == 1


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 experts do not split evenly over 4 ranks"):
        placement.place(np.ones((2, 1, 6), np.int32), np.zeros(2, np.int64), 1, 1, 4, 0)
