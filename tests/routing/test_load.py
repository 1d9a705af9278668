"""Load policies: only usable workers, the right ones, in turns, repeatable with a seed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.routing import load
from eldrd.routing.build import POLICIES, build
from eldrd.routing.policy import NoWorkerError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eldrd.routing.policy import Policy


def make(name: str, workers: int, seed: int = 0) -> Policy:
    return build(name, partition=None, workers=[f"d{i}" for i in range(workers)], tau=0.1, seed=seed)


def arrays(in_flight: list[int], usable: list[bool]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    return np.array(in_flight, np.int32), np.array(usable, np.bool_)


fleets = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=9)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=50, deadline=None)
@given(fleet=fleets, calls=st.integers(1, 5))
def test_chooses_usable_workers_only(name: str, fleet: list[tuple[int, bool]], calls: int) -> None:
    policy = make(name, len(fleet))
    in_flight, usable = arrays(*map(list, zip(*fleet, strict=True)))
    for _ in range(calls):
        if not usable.any():
            with pytest.raises(NoWorkerError):
                policy.choose(in_flight, usable, None)
            continue
        decision = policy.choose(in_flight, usable, None)
        assert usable[decision.worker]
        assert type(decision.worker) is int
        assert decision.score == in_flight[decision.worker]
        assert 1 <= decision.candidates <= usable.sum()
        if name in ("jsq", "eldr"):
            assert decision.score == in_flight[usable].min()


def test_reasons_and_candidates() -> None:
    in_flight, usable = arrays([1, 2, 3], [True, True, False])
    got = {name: make(name, 3).choose(in_flight, usable, None) for name in POLICIES}
    assert {name: d.reason for name, d in got.items()} == {
        "random": "random",
        "round_robin": "round_robin",
        "jsq": "jsq",
        "p2c": "p2c",
        "domain": "no_label",
        "eldr": "no_partition",
        "union": "signature_missing",
        "guarded_band": "signature_missing",
        "soft_band": "signature_missing",
    }
    assert {d.candidates for d in got.values()} == {2}


def test_jsq_ties_take_turns() -> None:
    policy = make("jsq", 4)
    in_flight, usable = arrays([1, 1, 2, 1], [True] * 4)
    assert [policy.choose(in_flight, usable, None).worker for _ in range(6)] == [0, 1, 3, 0, 1, 3]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 7).flatmap(
        lambda w: st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=w, max_size=w))
    )
)
def test_jsq_is_the_first_of_the_shortest_from_its_turn_on(moments: list[list[tuple[int, bool]]]) -> None:
    turn = 0
    policy = load.ShortestQueue()
    for fleet in moments:
        in_flight, usable = arrays(*map(list, zip(*fleet, strict=True)))
        rows = [row for row, (_, up) in enumerate(fleet) if up]
        if not rows:
            with pytest.raises(NoWorkerError):
                policy.choose(in_flight, usable)
            continue
        shortest = min(fleet[row][0] for row in rows)
        expected = min((r for r in rows if fleet[r][0] == shortest), key=lambda r: (r - turn) % len(fleet))
        assert policy.choose(in_flight, usable) == (expected, float(shortest), len(rows), "jsq")
        turn = expected + 1


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7).flatmap(lambda w: st.lists(st.lists(st.booleans(), min_size=w, max_size=w))))
def test_round_robin_is_the_next_usable(moments: list[list[bool]]) -> None:
    turn = 0
    policy = load.RoundRobin()
    for up in moments:
        rows = [row for row, ok in enumerate(up) if ok]
        if not rows:
            continue
        expected = min(rows, key=lambda r: (r - turn) % len(up))
        assert policy.choose(*arrays([0] * len(up), up)).worker == expected
        turn = expected + 1


def test_round_robin_skips_and_wraps() -> None:
    policy = make("round_robin", 4)
    in_flight, usable = arrays([9, 0, 0, 0], [True, False, True, True])
    assert [policy.choose(in_flight, usable, None).worker for _ in range(5)] == [0, 2, 3, 0, 2]


@pytest.mark.parametrize("name", ["random", "p2c"])
def test_seeded_policies_repeat(name: str) -> None:
    in_flight, usable = arrays([0] * 8, [True] * 8)

    def run(seed: int) -> list[int]:
        policy = make(name, 8, seed)
        return [policy.choose(in_flight, usable, None).worker for _ in range(50)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert set(run(1)) == set(range(8))


def test_p2c_takes_the_better_of_two() -> None:
    policy = make("p2c", 3)
    in_flight, usable = arrays([5, 1, 3], [True] * 3)
    got = Counter(policy.choose(in_flight, usable, None).worker for _ in range(600))
    assert got[0] == 0  # the worst loses against either
    assert got[1] / 600 == pytest.approx(2 / 3, abs=0.07)
    lonely = policy.choose(in_flight, np.array([True, False, False]), None)
    assert (lonely.worker, lonely.candidates) == (0, 1)


def test_takes_read_only_and_strided_views() -> None:
    in_flight, usable = arrays([2, 9, 1, 9, 0, 9], [True] * 6)
    frozen = in_flight[::2]
    frozen.flags.writeable = False
    assert make("jsq", 3).choose(frozen, usable[::2], None).worker == 2
    assert make("jsq", 3).choose(frozen.astype(np.int64), usable[::2], None).worker == 2  # type: ignore[arg-type]


def test_refuses_arrays_of_different_sizes() -> None:
    with pytest.raises(ValueError, match="expected \\[W\\] both"):
        make("jsq", 3).choose(np.zeros(3, np.int32), np.ones(2, np.bool_), None)
