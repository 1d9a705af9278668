"""Retries: what is tried again, at whose cost, and which breaker hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from eldrd.config import Settings
from eldrd.fleet.connection import UpstreamError
from eldrd.fleet.table import LoadTable, Pool
from eldrd.fleet.worker import Worker
from eldrd.handoff.failure import Failure
from eldrd.handoff.request import Record
from eldrd.handoff.retry import Retries, answered, final
from eldrd.telemetry.metrics import Metrics

ONE = {"workers": [{"name": "p0", "url": "http://127.0.0.1:1"}]}
TWO = {"workers": [{"name": "d0", "url": "http://127.0.0.1:2"}, {"name": "d1", "url": "http://127.0.0.1:3"}]}


class Case:
    def __init__(self, attempts: int = 2) -> None:
        settings = Settings(prefill=ONE, decode=TWO, retries={"attempts": attempts}, health={"failures": 3})
        self.health = settings.health
        self.record = Record(arrived=0.0)
        self.metrics = Metrics()
        self.retries = Retries(settings, self.metrics, self.record)
        table = LoadTable()
        self.workers = tuple(Worker(table, "decode", f"d{i}", f"http://127.0.0.1:{i}", 1.0) for i in (2, 3))
        for w in self.workers:
            w.probed(True, 1)
        self.pool = Pool(table, self.workers)

    def counted(self, cause: str) -> float:
        labels = {"role": "decode", "cause": cause}
        return self.metrics.registry.get_sample_value("eldrd_retries_total", labels) or 0.0


def error(phase: str, cause: str, *, answered: bool = False, stale: bool = False) -> UpstreamError:
    return UpstreamError(phase, cause, answered=answered, stale=stale)


REFUSED = error("connect", "refused")
RESET = error("first_byte", "reset")
STALE = error("first_byte", "reset", stale=True)


@pytest.mark.parametrize("e", [REFUSED, RESET, error("connect", "timeout")])
def test_tried_again_until_the_budget_is_spent(e: UpstreamError) -> None:
    case = Case(attempts=2)
    case.retries.again("decode", e)
    case.retries.again("decode", e)
    with pytest.raises(Failure):
        case.retries.again("decode", e)
    assert case.record.retries == [f"decode_{e.cause}"] * 2
    assert case.counted(e.cause) == 2


@pytest.mark.parametrize(
    ("e", "status"),
    [
        (error("first_byte", "timeout"), 504),
        (error("body", "timeout", answered=True), 504),
        (error("first_byte", "reset", answered=True), 502),
        (error("body", "reset", answered=True), 502),
        (error("first_byte", "framing"), 502),
        (error("body", "too_large", answered=True), 502),
    ],
)
def test_never_tried_again(e: UpstreamError, status: int) -> None:
    """A worker that was given its time, or began to answer, is not asked twice."""
    case = Case()
    with pytest.raises(Failure) as failure:
        case.retries.again("decode", e)
    assert failure.value.status == status
    assert case.record.retries == []


def test_a_stale_connection_costs_nothing_and_is_nobodys_fault() -> None:
    case = Case(attempts=0)
    for _ in range(3):
        case.retries.failed(case.workers[0], STALE)
        case.retries.again("decode", STALE)
    assert case.retries.usable(case.pool).tolist() == [True, True]
    assert case.workers[0].usable
    assert case.counted("stale") == 3


def test_a_worker_that_failed_this_request_is_not_asked_again() -> None:
    case = Case()
    case.retries.failed(case.workers[0], RESET)
    assert case.retries.usable(case.pool).tolist() == [False, True]
    # For other requests it still counts: one failure opens no breaker.
    assert case.pool.usable().tolist() == [True, True]


def test_an_unreachable_worker_is_out_for_everybody() -> None:
    case = Case()
    case.retries.failed(case.workers[0], REFUSED)
    assert case.pool.usable().tolist() == [False, True]


def test_a_stalled_client_is_not_the_workers_fault() -> None:
    case = Case()
    for _ in range(5):
        case.retries.failed(case.workers[0], error("body", "stalled", answered=True))
    assert case.workers[0].usable


@pytest.mark.parametrize(
    ("status", "usable"), [(200, True), (400, True), (404, True), (429, True), (500, False), (503, False)]
)
def test_breaker_hears_of_statuses(status: int, usable: bool) -> None:
    case = Case()
    for _ in range(20):
        answered(case.workers[0], status, case.health)
    assert case.workers[0].usable is usable


def test_a_good_answer_forgives() -> None:
    case = Case()
    for status in (500, 500, 200, 500, 500):
        answered(case.workers[0], status, case.health)
    assert case.workers[0].usable


def test_spend() -> None:
    case = Case(attempts=1)
    case.retries.spend("decode", "handoff_expired")
    with pytest.raises(Failure) as failure:
        case.retries.spend("decode", "handoff_expired")
    assert (failure.value.status, failure.value.outcome) == (502, "decode_handoff_expired")


@pytest.mark.parametrize(
    ("e", "status", "retry_after"),
    [(REFUSED, 503, 1), (error("connect", "timeout"), 504, None), (RESET, 502, None)],
)
def test_final(e: UpstreamError, status: int, retry_after: Any) -> None:
    failure = final("decode", e)
    assert (failure.status, failure.retry_after_s) == (status, retry_after)
