"""What workers run, against products of float64 probabilities over plain lists of requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.routing.batches import P_MAX, Batches, Running

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def draw(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Counts int32 [L, E] of so many tokens, each picking two experts a layer."""
    weights = rng.random((LAYERS, EXPERTS)) ** 6
    picks = np.argsort(-np.log(weights) + rng.gumbel(size=(tokens, LAYERS, EXPERTS)) * -1, axis=-1)[..., :TOP_K]
    return np.stack([np.bincount(picks[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)]).astype(
        np.int32
    )


class Reference:
    """The same by the formulas of the module's docstring, all in float64 and from scratch each time."""

    def __init__(self, ranks: np.ndarray) -> None:
        self.ranks = ranks
        self.prior: np.ndarray | None = None
        self.seen = 0
        self.there: dict[int, tuple[int, np.ndarray | None]] = {}

    def p(self, counts: np.ndarray, tokens: int) -> np.ndarray:
        prior = np.full(counts.shape, TOP_K / EXPERTS) if self.prior is None else self.prior
        return np.minimum((counts + 8 * prior) / (tokens + 8), P_MAX)

    def admit(self, key: int, slot: int, counts: np.ndarray | None, tokens: int) -> None:
        if counts is None:
            self.there[key] = slot, None if self.prior is None else np.minimum(self.prior, P_MAX)
            return
        self.there[key] = slot, self.p(counts, tokens)
        self.seen += 1
        before = np.full(counts.shape, TOP_K / EXPERTS) if self.prior is None else self.prior
        self.prior = before + (counts / tokens - before) / min(self.seen, 1000)

    def active(self, slot: int, more: np.ndarray | None = None) -> float:
        free = np.ones((LAYERS, EXPERTS))
        for where, p in self.there.values():
            if where == slot and p is not None:
                free *= 1 - p
        if more is not None:
            free *= 1 - more
        by_rank = [((1 - free) * (self.ranks == r)).sum(axis=1) for r in range(self.ranks.max() + 1)]
        return float(np.max(by_rank, axis=0).mean())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["one", "even", "map"]), st.integers(1, 4))
def test_active_experts_and_what_a_request_adds(seed: int, kind: str, workers: int) -> None:
    rng = np.random.default_rng(seed)
    ranks: np.ndarray | int = 1
    where = np.zeros((LAYERS, EXPERTS), np.int64)
    if kind == "even":
        ranks, where = 4, np.tile(np.arange(EXPERTS) // 2, (LAYERS, 1))
    elif kind == "map":
        ranks = where = np.stack([rng.permutation(np.arange(EXPERTS) % 3) for _ in range(LAYERS)])
    slots = rng.permutation(workers + 2)[:workers].astype(np.intp)
    batches, reference = Batches(ranks), Reference(where)
    batches.reserve(slots.tolist())
    running: dict[int, Running] = {}
    for step in range(30):
        if running and rng.random() < 0.4:
            key = int(rng.choice(list(running)))
            batches.end(running.pop(key), float(step))
            del reference.there[key]
        else:
            tokens = int(rng.integers(1, 60))
            counts = draw(rng, tokens) if rng.random() < 0.9 else None
            if counts is not None:
                assert batches.fits(counts)
                before = [reference.active(int(s)) for s in slots]
                p = reference.p(counts, tokens)
                expected = [reference.active(int(s), p) - b for s, b in zip(slots, before, strict=True)]
                assert batches.added(counts, tokens, slots) == pytest.approx(expected, abs=2e-3)
            slot = int(rng.choice(slots))
            running[step] = batches.admit(slot, counts, tokens, float(step))
            reference.admit(step, slot, counts, tokens)
        for s in slots:
            assert batches.active[s] == pytest.approx(reference.active(int(s)), abs=2e-3)
            assert batches.requests[s] == sum(w == s for w, _ in reference.there.values())
    for r in running.values():
        batches.end(r, 99.0)
        batches.end(r, 99.0)
    assert not batches.requests.any()
    assert not batches.active.any(), "an empty worker is exactly empty"


def test_a_long_run_leaves_nothing_behind() -> None:
    """Thousands of requests with p at its bound, deep below what float32 can hold as a product."""
    batches = Batches()
    batches.reserve([0])
    counts = np.zeros((1, 4), np.int32)
    counts[0, 0] = 5000
    held = [batches.admit(0, counts, 5000, 0.0) for _ in range(3000)]
    assert batches.active[0] >= 1
    other = np.zeros((1, 4), np.int32)
    other[0, 3] = 5000
    # Under all of them nothing is lost: the last one's expert still shows.
    last = batches.admit(0, other, 5000, 0.0)
    for r in held:
        batches.end(r, 0.0)
    assert batches.active[0] == pytest.approx(P_MAX, abs=0.02)
    batches.end(last, 0.0)
    assert batches.active[0] == 0


def test_other_models_count_as_average_ones_until_the_first_has_left() -> None:
    batches = Batches()
    batches.reserve([0])
    old, new = np.full((2, 4), 3, np.int32), np.full((3, 4), 3, np.int32)
    first = batches.admit(0, old, 6, 0.0)
    assert not batches.fits(new)
    assert batches.admit(0, new, 6, 0.0).units is not None
    assert not batches.fits(old.reshape(-1))
    batches = Batches()
    batches.reserve([0])
    first = batches.admit(0, old, 6, 0.0)
    batches.end(first, 1.0)
    assert batches.fits(new)
    assert batches.shape == (3, 4)


def test_slots_added_later_leave_the_others_alone() -> None:
    batches = Batches()
    batches.reserve([0])
    counts = np.full((2, 4), 3, np.int32)
    batches.admit(0, counts, 6, 0.0)
    before = batches.active[0]
    batches.reserve([4, 0])
    assert batches.active.tolist() == [before, 0, 0, 0, 0]


def test_means_over_a_requests_stay() -> None:
    batches = Batches()
    batches.reserve([0])
    counts = np.full((1, 4), 3, np.int32)
    one = batches.admit(0, counts, 6, 10.0)
    alone = float(batches.active[0])
    two = batches.admit(0, counts, 6, 12.0)
    both = float(batches.active[0])
    active, requests = batches.means(one, 16.0)
    assert active == pytest.approx((2 * alone + 4 * both) / 6)
    assert requests == pytest.approx((2 * 1 + 4 * 2) / 6)
    batches.end(one, 16.0)
    assert batches.means(two, 12.0 + 8)[1] == pytest.approx((4 * 2 + 4 * 1) / 8)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="ep_ranks is 0"):
        Batches(0)
    with pytest.raises(ValueError, match="none left out"):
        Batches(np.array([[0, 2]]))
    assert not Batches(3).fits(np.ones((2, 4), np.int32)), "four experts cannot lie evenly on three ranks"
