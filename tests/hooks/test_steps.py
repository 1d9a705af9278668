"""Active experts of decode steps against sets of experts, and the totals that are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from eldrd_hook import steps
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from numpy.typing import NDArray


def by_sets(ids: NDArray[np.signedinteger]) -> int:
    return sum(len({int(e) for token in ids for e in token[layer]}) for layer in range(ids.shape[1]))


def drawn(seed: int, tokens: int, layers: int, experts: int, k: int) -> NDArray[np.int16]:
    r = np.random.default_rng(seed)
    return np.argsort(r.random((tokens, layers, experts)), axis=2)[:, :, :k].astype(np.int16)


@given(
    seed=st.integers(0, 1 << 32),
    tokens=st.integers(1, 12),
    layers=st.integers(1, 4),
    experts=st.integers(2, 9),
    together=st.integers(1, 40),
)
def test_active_experts_are_those_of_sets(seed: int, tokens: int, layers: int, experts: int, together: int) -> None:
    ids = drawn(seed, tokens, layers, experts, 1 + seed % (experts - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_TOGETHER", together)
        assert steps.active_experts(ids, experts) == by_sets(ids)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_a_layer_that_did_not_report_is_no_step(wrong: int) -> None:
    ids = drawn(0, 5, 3, 6, 2)
    ids[4, 2, 1] = wrong
    assert steps.active_experts(ids, 6) is None


def test_totals_add_up_and_say_what_was_missed() -> None:
    meter = steps.Meter(6)
    assert not meter.news
    one, other = drawn(1, 3, 2, 6, 2), drawn(2, 9, 2, 6, 2)
    # Rows behind the step's tokens are padding, whatever they hold.
    padded = np.concatenate([one, np.full((2, 2, 2), -1, np.int16)])
    meter.count(3, 3, padded)
    meter.count(2, 9, other)
    meter.count(2, 9, None)
    meter.count(2, 10, other)
    meter.count(2, 5, padded)
    assert meter.news
    totals = meter.totals()
    assert not meter.news
    assert (totals.steps, totals.requests, totals.tokens, totals.missed) == (2, 5, 12, 3)
    assert totals.active == by_sets(one) + by_sets(other)
    meter.count(3, 3, one)
    again = meter.totals()
    assert (again.steps, again.active) == (3, 2 * by_sets(one) + by_sets(other))
