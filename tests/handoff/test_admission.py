"""Admission: never more at once than the limit, first come first served, and no place lost when waiters leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest

from eldrd.handoff.admission import Admission
from eldrd.handoff.failure import Failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def admission(limit: int, queue: int) -> Admission:
    a = Admission()
    a.limit, a.queue = limit, queue
    return a


@contextlib.asynccontextmanager
async def place(a: Admission) -> AsyncIterator[None]:
    await a.enter()
    try:
        yield
    finally:
        a.leave()


async def hold(a: Admission, release: asyncio.Event, order: list[int], i: int = 0) -> None:
    async with place(a):
        order.append(i)
        await release.wait()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served_then_refused() -> None:
    a, release, order = admission(2, 3), asyncio.Event(), list[int]()
    tasks = []
    for i in range(5):
        tasks.append(asyncio.create_task(hold(a, release, order, i)))
        await turn()
    assert (a.running, a.waiting, order) == (2, 3, [0, 1])
    with pytest.raises(Failure) as e:
        await hold(a, release, order)
    assert (e.value.status, e.value.retry_after_s) == (429, 1)
    release.set()
    await asyncio.gather(*tasks)
    assert (a.running, a.waiting, order) == (0, 0, [0, 1, 2, 3, 4])


async def test_no_limit() -> None:
    a, release = admission(0, 0), asyncio.Event()
    tasks = [asyncio.create_task(hold(a, release, [])) for _ in range(100)]
    await turn()
    assert a.running == 100
    release.set()
    await asyncio.gather(*tasks)
    assert a.running == 0


async def test_a_waiter_that_leaves_frees_its_place_in_the_queue() -> None:
    a, release = admission(1, 1), asyncio.Event()
    first = asyncio.create_task(hold(a, release, []))
    await turn()
    second = asyncio.create_task(hold(a, release, []))
    await turn()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert a.waiting == 0
    release.set()
    await first
    assert a.running == 0


async def test_a_waiter_that_leaves_in_the_moment_that_a_place_is_free() -> None:
    a, release, order = admission(1, 5), asyncio.Event(), list[int]()
    tasks = []
    for i in range(3):
        tasks.append(asyncio.create_task(hold(a, release, order, i)))
        await turn()
    # The first ends before the second has heard of its own cancellation.
    release.set()
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [type(None), asyncio.CancelledError, type(None)]
    assert (a.running, a.waiting) == (0, 0)


async def test_the_given_place_of_a_waiter_that_leaves_goes_on() -> None:
    a, release, order = admission(1, 5), asyncio.Event(), list[int]()
    tasks = []
    for i in range(3):
        tasks.append(asyncio.create_task(hold(a, release, order, i)))
        await turn()
    release.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (a.running, a.waiting) == (0, 0)
    assert order[-1] == 2


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_coming_and_going(seed: int) -> None:
    rng = random.Random(seed)
    a = admission(3, 6)
    at_once = most = 0

    async def one() -> None:
        nonlocal at_once, most
        async with place(a):
            at_once += 1
            most = max(most, at_once)
            try:
                await asyncio.sleep(rng.choice([0, 0, 0.0005]))
            finally:
                at_once -= 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        tasks.append(asyncio.create_task(one()))
        if rng.random() < 0.4:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(r is None or isinstance(r, Failure | asyncio.CancelledError) for r in results), results
    assert most <= 3
    assert (a.running, a.waiting) == (0, 0)


async def test_a_raised_limit_admits_those_who_wait() -> None:
    a = admission(1, 10)
    await a.enter()
    waiting = [asyncio.create_task(a.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    assert a.waiting == 3
    a.configure(3, 10)
    await asyncio.sleep(0)
    assert (a.running, a.waiting) == (3, 1)
    a.configure(0, 10)
    await asyncio.gather(*waiting)
    assert (a.running, a.waiting) == (4, 0)
