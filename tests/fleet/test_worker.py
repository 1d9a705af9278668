"""A worker's probes and breaker: what takes it out, what brings it back."""

from __future__ import annotations

import time

import pytest

from eldrd.fleet.table import LoadTable
from eldrd.fleet.worker import Worker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def worker(clock: Clock) -> Worker:
    return Worker(LoadTable(1), "decode", "d0", "http://127.0.0.1:9", 1.0)


def test_out_until_the_first_probe(worker: Worker) -> None:
    assert not worker.usable
    worker.probed(True, 3)
    assert worker.usable


def test_bad_probes_in_a_row_take_it_out_one_good_one_brings_it_back(worker: Worker) -> None:
    worker.probed(True, 3)
    for ok in (False, False, True, False, False):
        worker.probed(ok, 3)
    assert worker.usable
    worker.probed(False, 3)
    assert not worker.usable
    worker.probed(True, 3)
    assert worker.usable


def test_failures_in_a_row_open_the_breaker(worker: Worker) -> None:
    worker.probed(True, 3)
    for _ in range(2):
        worker.failed(3, 5.0, unreachable=False)
    worker.succeeded()
    for _ in range(2):
        worker.failed(3, 5.0, unreachable=False)
    assert worker.usable
    worker.failed(3, 5.0, unreachable=False)
    assert not worker.usable
    assert worker.opened == 1


def test_unreachable_opens_at_once(worker: Worker) -> None:
    worker.probed(True, 3)
    worker.failed(3, 5.0, unreachable=True)
    assert not worker.usable


def test_a_probe_after_the_open_time_closes_the_breaker(worker: Worker, clock: Clock) -> None:
    worker.probed(True, 3)
    worker.failed(1, 5.0, unreachable=False)
    worker.probed(True, 3)
    assert not worker.usable
    clock.now += 4.9
    worker.probed(True, 3)
    assert not worker.usable
    clock.now += 0.2
    worker.probed(True, 3)
    assert worker.usable
    worker.failed(2, 5.0, unreachable=False)
    assert worker.usable


def test_a_bad_probe_after_the_open_time_leaves_it_out(worker: Worker, clock: Clock) -> None:
    worker.probed(True, 1)
    worker.failed(1, 5.0, unreachable=False)
    clock.now += 6
    worker.probed(False, 1)
    assert not worker.usable


def test_failures_while_open_prolong_it_and_count_once(worker: Worker, clock: Clock) -> None:
    worker.probed(True, 3)
    worker.failed(1, 5.0, unreachable=False)
    clock.now += 4
    worker.failed(1, 5.0, unreachable=False)
    clock.now += 4
    worker.probed(True, 3)
    assert not worker.usable
    assert worker.opened == 1


def test_a_success_does_not_close_an_open_breaker(worker: Worker) -> None:
    """A long stream that ends well says nothing about new requests; the probe does."""
    worker.probed(True, 3)
    worker.failed(1, 5.0, unreachable=False)
    worker.succeeded()
    assert not worker.usable
