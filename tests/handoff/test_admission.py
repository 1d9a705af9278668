"""Admission: the limit, the queue, the order, and places given to someone who leaves."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.handoff.admission import Admission
from eldrd.handoff.failure import Failure


async def hold(admission: Admission, until: asyncio.Event, log: list[int] | None = None, name: int = 0) -> None:
    async with admission.admitted():
        if log is not None:
            log.append(name)
        await until.wait()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_limit() -> None:
    admission, end = Admission(), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, end)) for _ in range(100)]
    await turn()
    assert (admission.running, admission.waiting) == (100, 0)
    end.set()
    await asyncio.gather(*tasks)
    assert admission.running == 0


async def test_waits_in_order_and_refuses_what_the_queue_cannot_hold() -> None:
    admission = Admission()
    admission.limit, admission.queue = 1, 2
    ends = [asyncio.Event() for _ in range(3)]
    log: list[int] = []
    tasks = []
    for i, end in enumerate(ends):
        tasks.append(asyncio.create_task(hold(admission, end, log, i)))
        await turn()
    with pytest.raises(Failure) as e:
        await hold(admission, ends[0])
    assert (e.value.status, e.value.retry_after_s) == (429, 1)
    for i, end in enumerate(ends):
        assert log == list(range(i + 1))
        end.set()
        await turn()
    await asyncio.gather(*tasks)
    assert (admission.running, admission.waiting) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["come", "end", "leave"]), st.integers(0, 9)), max_size=40)
)
def test_places_are_neither_lost_nor_doubled(limit: int, steps: list[tuple[str, int]]) -> None:
    """Whoever comes, ends or leaves in any order: never more than the limit, and free places are taken."""

    async def run() -> None:
        admission = Admission()
        admission.limit, admission.queue = limit, 100
        here: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        for what, which in steps:
            if what == "come":
                end = asyncio.Event()
                here.append((asyncio.create_task(hold(admission, end)), end))
            elif here:
                task, end = here[which % len(here)]
                end.set() if what == "end" else task.cancel()
            if which % 2:
                await turn()
            assert admission.running <= limit
        await turn()
        here = [(t, e) for t, e in here if not t.done()]
        assert admission.running + admission.waiting <= len(here)
        assert admission.waiting == 0 or admission.running == limit
        for _, end in here:
            end.set()
        await asyncio.gather(*(t for t, _ in here), return_exceptions=True)
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(run())
