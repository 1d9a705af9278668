"""The yardstick itself: exact, a near tie, and a real difference must be told apart. Without torch."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.vllm.truth import Routing


def routing(logits: list[list[float]]) -> Routing:
    """One layer, top-2, from the logits of each token."""
    z = np.array(logits, np.float32)[:, None, :]
    return Routing(np.argsort(-z, axis=2)[:, :, :2], z)


TWO_TOKENS = routing([[5.0, 3.0, 2.99999, 0.0], [5.0, 4.0, 1.0, 0.0]])


def test_counts_and_gap() -> None:
    assert TWO_TOKENS.counts.tolist() == [[2, 2, 0, 0]]
    assert TWO_TOKENS.gap == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize(
    ("counts", "exact", "moved", "near_tie"),
    [
        ([2, 2, 0, 0], True, 0, False),
        ([2, 1, 1, 0], False, 1, True),  # the first token's second expert, 1e-5 apart
        ([2, 0, 2, 0], False, 2, False),  # only one token is that close
        ([2, 1, 0, 1], False, 1, False),  # never close
        ([2, 1, 0, 0], False, 0, False),  # a choice is missing
    ],
)
def test_compare(counts: list[int], exact: bool, moved: int, near_tie: bool) -> None:
    result = TWO_TOKENS.compare(np.array([counts]))
    assert (result.exact, result.moved, result.near_tie) == (exact, moved, near_tie)
