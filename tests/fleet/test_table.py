"""Load table: leases end once, nobody is charged for another's request, slots of removed workers stay theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from eldrd.fleet.table import Lease, LoadTable, Pool
from eldrd.fleet.worker import Worker


def worker(table: LoadTable, name: str = "d0") -> Worker:
    return Worker(table, "decode", name, "http://127.0.0.1:9", 1.0)


def up(table: LoadTable, name: str = "d0") -> Worker:
    w = worker(table, name)
    w.probed(True, 1)
    return w


def test_a_lease_ends_once() -> None:
    table = LoadTable(2)
    w = up(table)
    first, second = table.lease(w), table.lease(w)
    assert table.in_flight[w.slot] == 2
    first.end()
    first.end()
    assert table.in_flight[w.slot] == 1
    second.end()
    assert table.in_flight[w.slot] == 0


def test_growth_keeps_counts_and_slots() -> None:
    table = LoadTable(2)
    workers = [up(table, f"d{i}") for i in range(9)]
    pool = Pool(table, tuple(workers[:2]))
    leases = [table.lease(w) for i, w in enumerate(workers) for _ in range(i)]
    workers += [up(table, f"e{i}") for i in range(200)]
    assert [int(table.in_flight[w.slot]) for w in workers[:9]] == list(range(9))
    assert len({w.slot for w in workers}) == len(workers)
    assert pool.in_flight().tolist() == [0, 1]
    assert pool.usable().tolist() == [True, True]
    for lease in leases:
        lease.end()
    assert table.in_flight.sum() == 0


def test_pool_rows_follow_the_configuration() -> None:
    table = LoadTable(4)
    a, b = up(table, "a"), worker(table, "b")
    table.lease(b)
    assert Pool(table, (b, a)).in_flight().tolist() == [1, 0]
    assert Pool(table, (b, a)).usable().tolist() == [False, True]
    assert not Pool(table, (b,)).any_usable()
    assert Pool(table, (b, a)).any_usable()


def test_a_pool_older_than_a_reload_never_sees_its_successors_slot() -> None:
    """A request keeps the pool it began with; a worker removed meanwhile must not look usable to it because a new one
    came, nor may the new one be charged."""
    table = LoadTable(2)
    old = up(table, "old")
    pool = Pool(table, (old,))
    table.remove(old)
    new = up(table, "new")
    assert not pool.any_usable()
    lease = table.lease(old)
    assert table.in_flight[new.slot] == 0
    lease.end()
    assert table.in_flight[new.slot] == 0


def test_a_removed_worker_stays_out() -> None:
    table = LoadTable(2)
    w = up(table)
    lease = table.lease(w)
    table.remove(w)
    assert not w.usable
    w.probed(True, 1)
    assert not w.usable
    lease.end()
    new = up(table, "new")
    table.remove(w)
    assert new.usable
    assert table.in_flight.sum() == 0


class TableAgainstDict(RuleBasedStateMachine):
    """The table beside a dict of counts by worker, under any order of add, lease, end and remove."""

    workers: Bundle[Worker] = Bundle("workers")
    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.table = LoadTable(1)
        self.counts: dict[Worker, int] = {}
        self.usable: dict[Worker, bool] = {}
        self.pools: list[tuple[Pool, list[Worker]]] = []

    @rule(target=workers)
    def add(self) -> Worker:
        w = worker(self.table)
        self.counts[w], self.usable[w] = 0, False
        return w

    @rule(w=workers, ok=st.booleans())
    def probe(self, w: Worker, ok: bool) -> None:
        w.probed(ok, 1)
        self.usable[w] = ok and not w.removed

    @rule(w=workers)
    def remove(self, w: Worker) -> None:
        self.table.remove(w)
        self.usable[w] = False

    @rule(target=leases, w=workers)
    def lease(self, w: Worker) -> Lease:
        self.counts[w] += 1
        return self.table.lease(w)

    @rule(lease=consumes(leases), again=st.booleans())
    def end(self, lease: Lease, again: bool) -> None:
        self.counts[lease.worker] -= 1
        lease.end()
        if again:
            lease.end()

    @rule(some=st.lists(workers, min_size=1, max_size=4))
    def pool(self, some: list[Worker]) -> None:
        self.pools.append((Pool(self.table, tuple(some)), some))

    @invariant()
    def agree(self) -> None:
        for w, n in self.counts.items():
            assert self.table.in_flight[w.slot] == n
            assert w.usable == self.usable[w]
        for pool, some in self.pools:
            assert pool.in_flight().tolist() == [self.counts[w] for w in some]
            assert pool.usable().tolist() == [self.usable[w] for w in some]
        assert int(np.sum(self.table.in_flight)) == sum(self.counts.values())


TableAgainstDict.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTableAgainstDict: Any = TableAgainstDict.TestCase
