"""Keys, CORS and limits, at a real daemon."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp

from loadgen.workloads import Workload, requests

if TYPE_CHECKING:
    from pathlib import Path

    from daemon import Daemon

    from loadgen.fleet.emulated import EmulatedFleet

BODY = {"model": "emulated-moe", "prompt": requests(Workload(), 1, 31)[0].prompt, "max_tokens": 3}


async def test_client_and_worker_keys(eldrd: Daemon, fleet: EmulatedFleet, tmp_path: Path) -> None:
    """A request needs a key; it never reaches a worker, which gets its own; neither is logged."""
    (tmp_path / "keys").write_text("# people\nsk-alice\n\nsk-bob\n")
    (tmp_path / "worker").write_text("sk-worker\n")
    await eldrd.reload(auth={"client_keys_file": "keys", "worker_key_file": "worker"})
    async with aiohttp.ClientSession(eldrd.url) as s:
        for header in (None, "Bearer sk-eve", "Basic sk-alice", "sk-alice", "Bearer "):
            headers = {"Authorization": header} if header else {}
            async with s.post("/v1/completions", json=BODY, headers=headers) as r:
                assert r.status == 401
                assert (await r.json())["error"]["type"] == "AuthenticationError"
            async with s.get("/admin/status", headers=headers) as r:
                assert r.status == 401
        for key in ("sk-alice", "sk-bob"):
            async with s.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}) as r:
                assert r.status == 200
        for path in ("/health", "/ready", "/metrics"):
            async with s.get(path) as r:
                assert r.status == 200
    seen = {headers.get("Authorization") for w in fleet.workers for headers, _ in w.seen}
    assert seen == {"Bearer sk-worker"}
    await eldrd.logged("request", 2)
    log = eldrd.log.read_text()
    assert "sk-" not in log


async def test_a_key_file_that_cannot_be_used_changes_nothing(eldrd: Daemon, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n")
    await eldrd.reload(auth={"client_keys_file": "keys"})
    assert await eldrd.metric("eldrd_reloads_total", outcome="failed") == 1
    assert "holds no key" in (await eldrd.logged("reload_failed"))[0]["problems"][0]


async def test_cors(eldrd: Daemon, tmp_path: Path) -> None:
    """Without configuration none; with it, preflights pass without a key and answers name the origin."""
    mine, other = {"Origin": "https://chat.example.com"}, {"Origin": "https://evil.example.com"}
    async with aiohttp.ClientSession(eldrd.url) as s:
        async with s.options("/v1/completions", headers=mine) as r:
            assert r.status == 405
        (tmp_path / "keys").write_text("sk-alice\n")
        await eldrd.reload(cors={"origins": ["https://chat.example.com"]}, auth={"client_keys_file": "keys"})
        async with s.options("/v1/completions", headers=mine) as r:
            assert r.status == 204
            assert r.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
            assert "authorization" in r.headers["Access-Control-Allow-Headers"]
        async with s.options("/v1/completions", headers=other) as r:
            assert r.status == 401
            assert "Access-Control-Allow-Origin" not in r.headers
        async with s.post("/v1/completions", json=BODY, headers=mine) as r:
            assert r.status == 401
            assert r.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
        for stream in (False, True):
            headers = {**mine, "Authorization": "Bearer sk-alice"}
            async with s.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers) as r:
                assert r.status == 200
                assert r.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"


async def test_limits(eldrd: Daemon, fleet: EmulatedFleet) -> None:
    """One at a time, one waiting, the third gets 429; nobody is lost. The first is running while the others come."""
    await eldrd.reload(limits={"requests": 1, "queue": 1})
    long = {**BODY, "max_tokens": 1500, "ignore_eos": True}

    async def post(s: aiohttp.ClientSession) -> int:
        async with s.post("/v1/completions", json=long) as r:
            if r.status == 429:
                assert r.headers["Retry-After"] == "1"
                assert (await r.json())["error"]["type"] == "TooManyRequestsError"
            await r.read()
            return r.status

    async with aiohttp.ClientSession(eldrd.url) as s:
        statuses = await asyncio.gather(*(post(s) for _ in range(4)))
    assert sorted(statuses) == [200, 200, 429, 429]
    assert await eldrd.metric("eldrd_requests_waiting") == 0
    assert await eldrd.metric("eldrd_in_flight") == 0
