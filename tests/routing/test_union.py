"""union, guarded_band, domain and learned step times against their formulas in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import partition
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.partitions.transform import units
from eldrd.routing.build import Options, build
from eldrd.routing.domain import Domain
from eldrd.routing.policy import NoWorkerError
from eldrd.routing.steptime import Learner, StepTime
from eldrd.routing.union import GuardedBand, SoftBand, Union

SHAPE = (2, 4)


def some(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 9, SHAPE, np.int32)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([None, 0.0, 0.1, 0.5]),
    st.sampled_from([0.05, 0.3]),
)
def test_least_cost_behind_guard_and_band(seed: int, k: int, weight: float, guard: float | None, tau: float) -> None:
    rng = np.random.default_rng(seed)
    step, workers = StepTime(3.0, 0.7, 0.2), [f"d{i}" for i in range(k)]
    slots = rng.permutation(k + 1)[:k].tolist()
    p = partition(k, seed=seed)
    policy = (
        Union(slots, step, learn=False, weight=weight)
        if guard is None
        else GuardedBand(slots, step, partition=p, workers=workers, guard=guard, tau=tau, learn=False, weight=weight)
    )
    in_flight = np.zeros(k, np.int32)
    for _ in range(int(rng.integers(1, 12))):
        row = int(rng.integers(k))
        policy.admitted(row, some(rng), 18, 0.0)
        in_flight[row] += 1
    usable = rng.random(k) < 0.8
    counts = some(rng)
    if not usable.any():
        with pytest.raises(NoWorkerError):
            policy.choose(in_flight, usable, counts, 18)
        return
    rows = [r for r in range(k) if usable[r]]
    if guard is not None:
        mean = sum(in_flight[r] for r in rows) / len(rows)
        rows = [r for r in rows if in_flight[r] <= (1 + guard) * mean + 1]
        scores = (units(counts.reshape(1, *SHAPE), p.idf, p.layers) @ p.centroids.T)[0]
        best = max(scores[r] for r in rows)
        if any(abs(scores[r] - (best - tau)) < 1e-5 for r in rows):
            return
        rows = [r for r in rows if best <= 0 or scores[r] >= best - tau]
    added = policy._batches.added(counts, 18, np.array(slots, np.intp))
    active = {f.worker: f.value for f in policy.figures() if f.name == "active_experts"}

    def cost(r: int) -> float:
        lost = 0.7 * float(added[r]) + 0.2
        return float(weight * in_flight[r] * lost + 3.0 + 0.7 * active[r] + 0.2 * in_flight[r] + lost)

    decision = policy.choose(in_flight, usable, counts, 18)
    assert decision.candidates == len(rows)
    assert decision.score == pytest.approx(min(map(cost, rows)), abs=1e-4)
    assert cost(decision.worker) == pytest.approx(min(map(cost, rows)), abs=1e-4)
    assert decision.reason == ("union" if guard is None else "guarded")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([0.0, 2.0, 50.0]), st.sampled_from([1, 2]))
def test_soft_band_pulls_to_the_nearest_centroid(seed: int, k: int, pull: float, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    step, workers = StepTime(3.0, 0.7, 0.2), [f"d{i}" for i in range(k)]
    p = partition(k, seed=seed)
    policy = SoftBand(range(k), step, partition=p, workers=workers, guard=0.5, pull=pull, learn=False, ranks=ranks)
    bare = Union(range(k), step, learn=False, ranks=ranks)
    in_flight = np.zeros(k, np.int32)
    for _ in range(int(rng.integers(1, 12))):
        row, counts = int(rng.integers(k)), some(rng)
        for each in (policy, bare):
            each.admitted(row, counts, 18, 0.0)
        in_flight[row] += 1
    usable = rng.random(k) < 0.8
    usable[0] = True
    counts = rng.multinomial(36, np.full(4, 0.25), size=2).astype(np.int32)  # 18 tokens of top-2
    rows = [r for r in range(k) if usable[r]]
    mean = sum(in_flight[r] for r in rows) / len(rows)
    rows = [r for r in rows if in_flight[r] <= 1.5 * mean + 1]
    scores = (units(counts.reshape(1, *SHAPE), p.idf, p.layers) @ p.centroids.T)[0]

    def cost(r: int) -> float:
        only = np.zeros(k, np.bool_)
        only[r] = True
        union = bare.choose(in_flight, only, counts, 18).score
        return float(union + 0.7 * pull * 2 / ranks * (max(scores[i] for i in rows) - scores[r]))

    decision = policy.choose(in_flight, usable, counts, 18)
    assert (decision.reason, decision.candidates) == ("soft", len(rows))
    assert decision.score == pytest.approx(min(map(cost, rows)), abs=1e-3)
    assert cost(decision.worker) == pytest.approx(min(map(cost, rows)), abs=1e-3)


def test_alike_requests_gather_and_others_keep_away() -> None:
    policy = Union([0, 1], StepTime(1.0, 1.0, 0.01), learn=False)
    left, right = np.zeros((1, 8), np.int32), np.zeros((1, 8), np.int32)
    left[0, :2], right[0, 6:] = 100, 100
    in_flight, usable = np.zeros(2, np.int32), np.ones(2, np.bool_)
    homes = []
    for counts in [left, right] * 6:
        worker = policy.choose(in_flight, usable, counts, 100).worker
        policy.admitted(worker, counts, 100, 0.0)
        in_flight[worker] += 1
        homes.append(worker)
    assert homes == [homes[0], 1 - homes[0]] * 6


def test_fallbacks_are_jsq_with_a_reason() -> None:
    in_flight, usable = np.array([3, 1, 2], np.int32), np.ones(3, np.bool_)
    for name in ("union", "guarded_band", "soft_band"):
        policy = build(name, partition=None, workers=["d0", "d1", "d2"], tau=0.1)
        running = policy.admitted(0, np.ones((2, 4), np.int32), 4, 0.0)
        for counts, tokens, reason in (
            (None, 0, "signature_missing"),
            (np.ones((2, 4), np.int32), 0, "signature_missing"),
            (np.ones((3, 4), np.int32), 4, "signature_mismatch"),
        ):
            decision = policy.choose(in_flight, usable, counts, tokens)
            assert (decision.worker, decision.reason) == (1, reason)
            with pytest.raises(NoWorkerError):
                policy.choose(in_flight, np.zeros(3, np.bool_), counts, tokens)
        policy.ended(running, 1.0)
        policy.ended(running, 1.0)
        assert {f.value for f in policy.figures() if f.name == "active_experts"} == {0.0}


def test_options_out_of_bounds_are_refused() -> None:
    def make(name: str, **options: float) -> None:
        build(name, partition=None, workers=["d0"], tau=0.1, options=Options(**options))  # type: ignore[arg-type]

    for name, option, what in (
        ("union", "weight", "weight"),
        ("guarded_band", "guard", "guard"),
        ("soft_band", "soft_guard", "guard"),
        ("soft_band", "pull", "pull"),
    ):
        for value in (-1.0, float("nan"), 101.0):
            with pytest.raises(ValueError, match=f"{what} is .*, expected 0..100"):
                make(name, **{option: value})


def test_a_reload_keeps_what_runs_by_slot() -> None:
    counts = np.ones((2, 4), np.int32)
    old = build("union", partition=None, workers=["a", "b"], tau=0.1, slots=[0, 1])
    running = old.admitted(1, counts, 4, 0.0)
    new = build("guarded_band", partition=None, workers=["b", "c"], tau=0.1, slots=[1, 2], before=old)

    def active() -> list[float]:
        return [f.value for f in new.figures() if f.name == "active_experts"]

    assert active()[0] > 0
    assert active()[1] == 0
    old.ended(running, 1.0)
    assert active() == [0, 0]
    other = build("union", partition=None, workers=["b"], tau=0.1, slots=[1], before=new, options=Options(ranks=2))
    assert not [f for f in other.figures() if f.name == "active_experts" and f.value]


def test_domain_is_jsq_among_the_labels_workers() -> None:
    policy = Domain(["a", "b", "c"], {"code": ["a", "c"], "law": ["b"]})
    in_flight, usable = np.array([4, 0, 3], np.int32), np.ones(3, np.bool_)

    def choose(label: str | None) -> tuple[int, str, int]:
        d = policy.choose(in_flight, usable, None, 0, label)
        return d.worker, d.reason, d.candidates

    assert choose("code") == (2, "domain", 2)
    assert choose("law") == (1, "domain", 1)
    assert choose(None) == (1, "no_label", 3)
    assert choose("poetry") == (1, "label_unknown", 3)
    usable[1] = False
    assert choose("law") == (2, "domain_down", 2)
    with pytest.raises(ValueError, match="label 'x' has workers the fleet lacks: d"):
        Domain(["a"], {"x": ["a", "d"]})
    with pytest.raises(ValueError, match="label 'x' has no workers"):
        Domain(["a"], {"x": []})


def serve(learner: Learner, rng: np.random.Generator, truth: dict[int, tuple[float, float, float]], n: int) -> None:
    for i in range(n):
        slot = i % len(truth)
        requests = float(rng.uniform(2, 40))
        active = 100 * (1 - np.exp(-requests / 15)) * rng.uniform(0.85, 1.15)
        base, expert, request = truth[slot]
        tpot = base + expert * active + request * requests + rng.normal(0, 0.3)
        if rng.random() < 0.05:
            tpot *= 10
        learner.observe(slot, active, requests, tpot)


def test_learning_finds_each_workers_step_time_in_spite_of_outliers() -> None:
    truth = {0: (8.0, 0.15, 0.05), 1: (8.0, 0.15, 0.05), 2: (8.0, 0.15, 0.05), 3: (10.0, 0.3, 0.1)}
    learner = Learner(StepTime(5.5, 0.2, 0.06), learn=True)
    learner.reserve(range(4))
    serve(learner, np.random.default_rng(0), truth, 4000)
    for slot, (base, expert, request) in truth.items():
        for active, requests in ((40, 8), (90, 30)):
            expected = base + expert * active + request * requests
            assert learner.rows[slot] @ (1, active, requests) == pytest.approx(expected, rel=0.05)
        assert learner.rows[slot, 1] == pytest.approx(expert, rel=0.25)
    learner.reserve(range(5))
    assert learner.rows[4] @ (1, 90, 30) > learner.rows[0] @ (1, 90, 30) * 0.9


@pytest.mark.parametrize("times", [1.0, 30.0])
def test_learning_finds_a_machine_of_another_scale(times: float) -> None:
    """A processor is thirty times as slow as what is given, and its requests weigh more beside its experts."""
    truth = dict.fromkeys(range(2), (8.0 * times, 0.2 * times, 0.3 * times))
    learner = Learner(StepTime(5.5, 0.2, 0.06), learn=True)
    learner.reserve(range(2))
    serve(learner, np.random.default_rng(0), truth, 3000)
    for base, expert, request in truth.values():
        for active, requests in ((40, 8), (90, 30)):
            expected = base + expert * active + request * requests
            assert learner.rows[0] @ (1, active, requests) == pytest.approx(expected, rel=0.08)
        assert learner.rows[0, 2] == pytest.approx(request, rel=0.6)


def test_given_step_times_stay_without_learning_and_bad_ones_are_refused() -> None:
    learner = Learner(StepTime(1, 2, 3), learn=False)
    learner.reserve([0])
    learner.observe(0, 10, 10, 99)
    assert learner.rows.tolist() == [[1, 2, 3]]
    learner = Learner(StepTime(1, 2, 0), learn=True)
    learner.reserve([0])
    for tpot in (float("nan"), 0.0, *([50.0] * 40)):
        learner.observe(0, 10, 10, tpot)
    assert learner.rows[0, 2] == 0
    assert learner.rows[0] @ (1, 10, 10) == pytest.approx(50, rel=0.2)
    for values in ((1, 0, 0), (-1, 1, 1), (1, float("inf"), 1)):
        with pytest.raises(ValueError, match="step time is"):
            StepTime(*values)
