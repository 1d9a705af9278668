"""Probes of the workers: is it up, which models does it serve. Decides nothing about requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from eldrd.config import Health
    from eldrd.fleet.worker import Worker

# Many probes that begin in one turn would hold the loop: each is a tenth of a millisecond or two.
_APART_S: Final = 0.001


class Prober:
    """Asks each worker's /health every ``interval_s`` and its /v1/models when it comes up."""

    def __init__(self, changed: Callable[[Worker], None]) -> None:
        """changed: called on the loop when a worker goes up or down."""
        self._changed = changed
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {}

    def watch(self, workers: Iterable[Worker], settings: Health, headers: dict[str, str]) -> None:
        """Probe exactly these workers from now on, with these settings and request headers."""
        self._headers = headers
        for worker in list(self._tasks):
            self._tasks.pop(worker).cancel()
        loop = asyncio.get_running_loop()
        for i, worker in enumerate(workers):
            self._tasks[worker] = loop.create_task(self._probe_for_ever(worker, settings, i * _APART_S))

    async def meet(self, workers: Iterable[Worker], settings: Health) -> None:
        """Probe workers once, so that those which are up are usable when this returns, little more than
        ``timeout_s`` later at most."""
        await asyncio.gather(*(self._probe(worker, settings, i * _APART_S) for i, worker in enumerate(workers)))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        if self._session is not None:
            await self._session.close()

    async def _probe_for_ever(self, worker: Worker, settings: Health, delay_s: float) -> None:
        while True:
            await self._probe(worker, settings, delay_s)
            delay_s = 0.0
            # Start-up and recovery are watched closely, a running worker is not.
            await asyncio.sleep(settings.interval_s if worker.up else min(0.5, settings.interval_s))

    async def _probe(self, worker: Worker, settings: Health, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        was = worker.up
        ok, refused = await self._answers(worker, settings.timeout_s)
        if ok and not (was and worker.cards):
            worker.cards = await self._cards(worker, settings.timeout_s)
        # At start-up nothing is known yet, and a port that nobody listens on needs no second look.
        worker.probed(ok, 1 if refused or not was else settings.failures)
        if worker.up != was:
            self._changed(worker)

    def _ask(self, worker: Worker, path: str, timeout_s: float) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(timeout_s)
        return self._session.get(worker.url + path, headers=self._headers, timeout=timeout, allow_redirects=False)

    async def _answers(self, worker: Worker, timeout_s: float) -> tuple[bool, bool]:
        """Whether the worker is healthy, and whether it refused the connection."""
        try:
            async with self._ask(worker, "/health", timeout_s) as r:
                return r.status == 200, False
        except aiohttp.ClientConnectorError:
            return False, True
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False, False

    async def _cards(self, worker: Worker, timeout_s: float) -> tuple[dict[str, Any], ...]:
        problems = (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError, KeyError, TypeError)
        with contextlib.suppress(*problems):
            async with self._ask(worker, "/v1/models", timeout_s) as r:
                listing: dict[str, Any] = orjson.loads(await r.read())
                return tuple({**card, "id": str(card["id"])} for card in listing["data"])
        return ()
