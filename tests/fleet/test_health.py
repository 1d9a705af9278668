"""Probes over real HTTP: workers that are up, down, slow, come back, or answer nonsense."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from eldrd.config import Health
from eldrd.fleet import health
from eldrd.fleet.health import Prober
from eldrd.fleet.table import LoadTable
from eldrd.fleet.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SETTINGS = Health(interval_s=0.01, timeout_s=10.0, failures=3)


class Server:
    """A worker's probed paths. status, delay_s, models: what it answers."""

    def __init__(self) -> None:
        self.status = 200
        self.delay_s = 0.0
        self.models: Any = {"data": [{"id": "m", "max_model_len": 10}]}
        self.asked = {"health": 0, "models": 0}
        self.keys: set[str | None] = set()
        self.changes: list[bool] = []
        self.prober = Prober(lambda worker: self.changes.append(worker.up))
        self.worker: Worker

    async def health(self, request: web.Request) -> web.Response:
        self.asked["health"] += 1
        self.keys.add(request.headers.get("Authorization"))
        if self.status == 302:
            raise web.HTTPFound("/v1/models")
        await asyncio.sleep(self.delay_s)
        return web.Response(status=self.status)

    async def cards(self, _: web.Request) -> web.Response:
        self.asked["models"] += 1
        if isinstance(self.models, bytes):
            return web.Response(body=self.models)
        return web.json_response(self.models)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110, nothing tells
                await asyncio.sleep(0.002)

    async def probes(self, n: int) -> None:
        start = self.asked["health"]
        await self.until(lambda: self.asked["health"] >= start + n)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/models", server.cards)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.worker = Worker(LoadTable(), "decode", "d0", f"http://127.0.0.1:{runner.addresses[0][1]}", 1.0)
    yield server
    await server.prober.close()
    await runner.cleanup()


async def test_up_with_its_cards(server: Server) -> None:
    server.prober.watch([server.worker], SETTINGS, {})
    await server.until(lambda: server.worker.usable)
    assert server.worker.cards == ({"id": "m", "max_model_len": 10},)
    await server.probes(3)
    assert server.asked["models"] == 1
    assert server.changes == [True]


async def test_down_after_failures_in_a_row_and_back_after_one(server: Server) -> None:
    server.prober.watch([server.worker], SETTINGS, {})
    await server.until(lambda: server.worker.usable)
    server.status = 503
    start = server.asked["health"]
    await server.until(lambda: not server.worker.usable)
    assert server.asked["health"] - start >= 3
    server.status = 200
    await server.until(lambda: server.worker.usable)
    assert server.changes == [True, False, True]
    assert server.asked["models"] == 2


async def test_too_slow_is_down(server: Server) -> None:
    server.delay_s = 2.0
    server.prober.watch([server.worker], Health(interval_s=0.01, timeout_s=0.1, failures=3), {})
    await server.probes(3)
    assert not server.worker.up
    server.delay_s = 0.0
    await server.until(lambda: server.worker.usable)


async def test_refused_is_down(server: Server) -> None:
    worker = Worker(LoadTable(), "decode", "d1", "http://127.0.0.1:1", 1.0)
    server.prober.watch([worker], SETTINGS, {})
    await asyncio.sleep(0.05)
    assert not worker.up


@pytest.mark.parametrize("models", [b"{", b"", [], {}, {"data": None}, {"data": [1]}, {"data": [{}]}, {"data": "x"}])
async def test_cards_that_are_none(server: Server, models: Any) -> None:
    """The worker serves all the same, and is asked again."""
    server.models = models
    server.prober.watch([server.worker], SETTINGS, {})
    await server.until(lambda: server.worker.usable and server.asked["models"] >= 2)
    assert server.worker.cards == ()
    server.models = {"data": [{"id": 7}]}
    await server.until(lambda: server.worker.cards == ({"id": "7"},))


async def test_watching_others_ends_the_probes(server: Server) -> None:
    server.prober.watch([server.worker], SETTINGS, {})
    await server.until(lambda: server.worker.usable)
    server.prober.watch([], SETTINGS, {})
    await asyncio.sleep(0.2)
    before = server.asked["health"]
    await asyncio.sleep(0.05)
    assert server.asked["health"] == before


async def test_watched_again_with_other_settings(server: Server) -> None:
    """A reload: nothing is forgotten of a worker that stays."""
    server.prober.watch([server.worker], SETTINGS, {})
    await server.until(lambda: server.worker.usable)
    server.prober.watch([server.worker], Health(interval_s=0.01, timeout_s=10.0, failures=1), {})
    assert server.worker.usable
    server.status = 500
    await server.until(lambda: not server.worker.usable)


async def test_headers_go_along(server: Server) -> None:
    server.prober.watch([server.worker], SETTINGS, {"Authorization": "Bearer k"})
    await server.until(lambda: server.worker.usable)
    assert server.keys == {"Bearer k"}


async def test_a_redirect_is_no_good_health(server: Server) -> None:
    """And nobody is sent elsewhere with the worker's key."""
    server.status = 302
    server.prober.watch([server.worker], SETTINGS, {"Authorization": "Bearer k"})
    await server.probes(3)
    assert not server.worker.up
    assert server.asked["models"] == 0


@pytest.mark.parametrize("meet", [False, True])
async def test_probes_of_many_workers_do_not_begin_in_one_turn_of_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, meet: bool
) -> None:
    workers = [Worker(LoadTable(), "decode", f"d{i}", server.worker.url, 1.0) for i in range(20)]
    turn, begun = 0, []
    ask = server.prober._ask

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def noted(worker: Worker, path: str, timeout_s: float) -> Any:
        if path == "/health":
            begun.append(turn)
        return ask(worker, path, timeout_s)

    # Wider than they are, for a busy machine's turns of the loop take longer.
    monkeypatch.setattr(health, "_APART_S", 0.03)
    monkeypatch.setattr(server.prober, "_ask", noted)
    ticker = asyncio.create_task(turns())
    if meet:
        await server.prober.meet(workers, SETTINGS)
    else:
        server.prober.watch(workers, Health(interval_s=60), {})
    await server.until(lambda: all(w.up for w in workers))
    ticker.cancel()
    assert len(begun) == 20
    assert len(set(begun)) >= 5
