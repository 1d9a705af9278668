"""Prefix hashing: stable, even, little moved when a worker comes or goes, gated by load."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.routing.build import build_prefill
from eldrd.routing.policy import NoWorkerError
from eldrd.routing.prefill import PrefixHash

KEYS = [f"prompt number {i}".encode() for i in range(4000)]


def owners(workers: list[str]) -> list[str]:
    policy = PrefixHash(workers)
    idle, up = np.zeros(len(workers), np.int32), np.ones(len(workers), np.bool_)
    return [workers[policy.choose(key, idle, up).worker] for key in KEYS]


def test_does_not_depend_on_process_or_order() -> None:
    workers = ["p0", "p1", "p2"]
    assert owners(workers) == owners(workers[::-1])
    assert [owners(workers)[i] for i in range(6)] == ["p2", "p2", "p2", "p0", "p2", "p2"]


def test_spreads_keys_evenly_and_moves_few() -> None:
    three, four = owners(["p0", "p1", "p2"]), owners(["p0", "p1", "p2", "p3"])
    shares = Counter(four)
    assert min(shares.values()) > 0.7 * len(KEYS) / 4
    moved = [(a, b) for a, b in zip(three, four, strict=True) if a != b]
    assert {b for _, b in moved} == {"p3"}
    assert len(moved) / len(KEYS) < 0.35


def test_only_the_beginning_counts() -> None:
    policy = PrefixHash([f"p{i}" for i in range(50)])
    idle, up = np.zeros(50, np.int32), np.ones(50, np.bool_)
    base = policy.choose(b"a" * 1024, idle, up).worker
    assert policy.choose(b"a" * 1024 + b"tail", idle, up).worker == base
    assert policy.choose(b"a" * 1023 + b"b", idle, up).worker != base
    assert policy.choose(b"", idle, up).reason == "prefix"


def test_a_worker_that_is_down_leaves_only_its_own_keys() -> None:
    workers = ["p0", "p1", "p2"]
    policy = PrefixHash(workers)
    idle = np.zeros(3, np.int32)
    up, without = np.ones(3, np.bool_), np.array([True, False, True])
    for key in KEYS[:300]:
        before, after = policy.choose(key, idle, up), policy.choose(key, idle, without)
        if before.worker == 1:
            assert (after.reason, after.worker != 1) == ("down", True)
        else:
            assert after == before
    stand_ins = {policy.choose(key, idle, without).worker for key in KEYS[:300] if owners_row(policy, key) == 1}
    assert stand_ins == {0, 2}


def owners_row(policy: PrefixHash, key: bytes) -> int:
    return policy.choose(key, np.zeros(3, np.int32), np.ones(3, np.bool_)).worker


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=6), st.sampled_from(KEYS))
def test_gate(fleet: list[tuple[int, bool]], key: bytes) -> None:
    policy = PrefixHash([f"p{i}" for i in range(len(fleet))])
    in_flight = np.array([n for n, _ in fleet], np.int32)
    usable = np.array([up for _, up in fleet], np.bool_)
    rows = [i for i, up in enumerate(usable) if up]
    if not rows:
        with pytest.raises(NoWorkerError):
            policy.choose(key, in_flight, usable)
        return
    decision = policy.choose(key, in_flight, usable)
    owner = policy.choose(key, np.zeros_like(in_flight), usable).worker
    limit = math.ceil(1.25 * (sum(int(in_flight[r]) for r in rows) + 1) / len(rows))
    if in_flight[owner] + 1 <= limit:
        assert decision.worker == owner
        assert decision.reason in ("prefix", "down")
        assert decision.candidates == 1
    else:
        assert decision.reason == "gate"
        assert decision.score == min(int(in_flight[r]) for r in rows)
        assert usable[decision.worker]


@pytest.mark.parametrize("gate", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("load", [0, 1, 7])
def test_a_worker_alone_gets_everything(gate: float, load: int) -> None:
    """What two workers decide where the second is down, but for what that is called."""
    alone, two = PrefixHash(["p0"], gate=gate), PrefixHash(["p0", "p1"], gate=gate)
    for key in KEYS[:20]:
        own = alone.choose(key, np.array([load], np.int32), np.array([True]))
        other = two.choose(key, np.array([load, 99], np.int32), np.array([True, False]))
        assert own[:3] == other[:3]
        assert own.reason == ("gate" if other.reason == "gate" else "prefix")
    with pytest.raises(NoWorkerError):
        alone.choose(KEYS[0], np.zeros(1, np.int32), np.array([False]))


@pytest.mark.parametrize(("name", "reason"), [("prefix_hash", "down"), ("jsq", "jsq"), ("round_robin", "round_robin")])
def test_policies_by_name(name: str, reason: str) -> None:
    policy = build_prefill(name, workers=["p0", "p1"])
    decision = policy.choose(b"prompt", np.zeros(2, np.int32), np.array([False, True]))
    assert (decision.worker, decision.reason) == (1, reason)
    with pytest.raises(NoWorkerError):
        policy.choose(b"prompt", np.zeros(2, np.int32), np.zeros(2, np.bool_))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="prefill policy is 'p2c', expected prefix_hash, jsq or round_robin"):
        build_prefill("p2c", workers=["p0"])
