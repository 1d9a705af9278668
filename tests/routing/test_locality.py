"""The locality band against the paper's sentence written in plain Python, and every fallback."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import partition
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.partitions.transform import units
from eldrd.routing import batches, load, locality, union
from eldrd.routing import build as build_module
from eldrd.routing.locality import LocalityBand
from eldrd.routing.policy import NoWorkerError


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.sampled_from([0, 0.05, 0.1, 0.3, 1]))
def test_fewest_in_flight_within_tau_of_the_best_usable(seed: int, k: int, tau: float) -> None:
    rng = np.random.default_rng(seed)
    p = partition(k, seed=seed)
    order = rng.permutation(k)
    policy = LocalityBand(p, [f"d{i}" for i in order], tau)
    counts = rng.integers(0, 9, 8, np.int32)
    counts[seed % 8] = 9
    in_flight, usable = rng.integers(0, 3, k, np.int32), rng.random(k) < 0.7
    if not usable.any():
        with pytest.raises(NoWorkerError):
            policy.choose(in_flight, usable, counts)
        return
    scores = (units(counts.reshape(1, 2, 4), p.idf, p.layers) @ p.centroids[order].T)[0]
    best = max(scores[w] for w in range(k) if usable[w])
    band = [w for w in range(k) if usable[w] and scores[w] >= best - tau]
    decision = policy.choose(in_flight, usable, counts)
    if any(abs(scores[w] - (best - tau)) < 1e-5 for w in range(k) if usable[w] and scores[w] != best):
        return  # float32 sums of another order may fall on the other side of the edge
    assert decision.reason == "band"
    assert decision.candidates == len(band)
    assert decision.worker == min(band, key=lambda w: (in_flight[w], -scores[w]))
    assert decision.score == pytest.approx(scores[decision.worker], abs=1e-5)
    assert (type(decision.worker), type(decision.score)) == (int, float)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.sampled_from([0, 0.02, 0.1]))
def test_the_second_nearest_joins_a_band_of_one(seed: int, k: int, tau: float) -> None:
    rng = np.random.default_rng(seed)
    p = partition(k, seed=seed)
    workers = [f"d{i}" for i in range(k)]
    counts = rng.integers(1, 9, 8, np.int32)
    in_flight, usable = rng.integers(0, 3, k, np.int32), rng.random(k) < 0.8
    usable[:2] = True
    scores = (units(counts.reshape(1, 2, 4), p.idf, p.layers) @ p.centroids.T)[0]
    ranked = sorted(np.flatnonzero(usable), key=lambda w: -scores[w])
    band = [w for w in ranked if scores[w] >= scores[ranked[0]] - tau]
    if any(abs(scores[w] - (scores[ranked[0]] - tau)) < 1e-5 for w in ranked[1:]):
        return
    if len(band) == 1 and tau > 0:
        band = ranked[:2]
    decision = LocalityBand(p, workers, tau, second_nearest=True).choose(in_flight, usable, counts)
    assert decision.worker == min(band, key=lambda w: (in_flight[w], -scores[w]))
    assert decision.candidates == len(band)


def test_an_unusable_best_worker_does_not_narrow_the_band() -> None:
    p = partition(2, layers=1, experts=2)
    p.centroids[:] = np.eye(2)
    p.idf[:] = 1
    policy = LocalityBand(p, ["d0", "d1"], 0.1)
    counts, idle = np.array([9, 1], np.int32), np.zeros(2, np.int32)
    assert policy.choose(idle, np.array([True, True]), counts).worker == 0
    decision = policy.choose(idle, np.array([False, True]), counts)
    assert (decision.worker, decision.candidates, decision.reason) == (1, 1, "band")


def test_fallbacks_are_jsq_with_a_reason() -> None:
    in_flight, usable = np.array([3, 1, 1], np.int32), np.ones(3, np.bool_)
    workers = ["d0", "d1", "d2"]
    with_partition = LocalityBand(partition(3), workers, 0.1)
    cases = [
        (LocalityBand(None, workers, 0.1), np.ones(8, np.int32), "no_partition"),
        (with_partition, None, "signature_missing"),
        (with_partition, np.ones(9, np.int32), "signature_mismatch"),
        (with_partition, np.zeros(8, np.int32), "no_affinity"),
    ]
    for policy, counts, reason in cases:
        first, second = (policy.choose(in_flight, usable, counts) for _ in range(2))
        assert (first.reason, first.score, first.candidates) == (reason, 1.0, 3)
        assert {first.worker, second.worker} == {1, 2} or policy is with_partition
        with pytest.raises(NoWorkerError):
            policy.choose(in_flight, np.zeros(3, np.bool_), counts)


def test_read_only_and_strided_views_compile_nothing() -> None:
    policy = LocalityBand(partition(3), ["d0", "d1", "d2"], 0.1)
    in_flight, usable = np.array([2, 9, 1, 9, 0, 9], np.int32)[::2], np.ones(6, np.bool_)[::2]
    counts = np.arange(16, dtype=np.int32)[::2]
    expected = policy.choose(in_flight.copy(), usable.copy(), counts.copy())
    before = len(locality._band.signatures)
    for array in (in_flight, usable, counts):
        array.flags.writeable = False
    assert policy.choose(in_flight, usable, counts) == expected
    assert policy.choose(in_flight.astype(np.int64), usable, counts) == expected
    assert len(locality._band.signatures) == before


def test_refusals() -> None:
    with pytest.raises(ValueError, match="the partition has workers the fleet lacks: d1"):
        LocalityBand(partition(2), ["d0"], 0.1)
    for tau in (-0.1, 2.1, float("nan")):
        with pytest.raises(ValueError, match=r"expected 0\.\.2"):
            LocalityBand(None, ["d0"], tau)
    with pytest.raises(
        ValueError,
        match="policy is 'x', expected one of random, round_robin, jsq, p2c, domain, eldr, union, guarded_band, soft_band",
    ):
        build_module.build("x", partition=None, workers=["d0"], tau=0.1)
    with pytest.raises(ValueError, match="usable has 2 workers, the partition 3"):
        LocalityBand(partition(3), ["d0", "d1", "d2"], 0.1).choose(
            np.zeros(2, np.int32), np.ones(2, np.bool_), np.ones(8, np.int32)
        )


def test_warm_up_covers_decisions() -> None:
    build_module.warm_up()
    modules = (load, locality, batches, union)
    kernels = [k for m in modules for k in vars(m).values() if hasattr(k, "signatures")]
    assert len(kernels) >= 9
    compiled = [len(k.signatures) for k in kernels]
    for name in build_module.POLICIES:
        policy = build_module.build(name, partition=partition(3), workers=["d0", "d2", "d1"], tau=1)
        assert policy.name == name
        for counts in (np.ones((2, 4), np.int32), None):
            policy.choose(np.zeros(3, np.int32), np.ones(3, np.bool_), counts, 4)
            policy.ended(policy.admitted(1, counts, 4, 0.0), 1.0)
    assert [len(k.signatures) for k in kernels] == compiled
