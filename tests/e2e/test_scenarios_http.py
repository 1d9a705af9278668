"""Scenarios H1-H8: connections, sizes, codings, origins, limits."""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest
from stage import CHAT, MODEL, Stage, ask, until

from eldrd.fleet import pool
from loadgen.daemon import Daemon
from loadgen.fleet import EmulatedFleet, FleetSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("cut", ["close", "reset"])
async def test_h1_kept_connections_closed_when_used(stage: Stage, cut: str) -> None:
    """The worker ends each kept connection just as the next request comes on it: tried again, on no budget."""
    assert pool.MAX_IDLE_S < 5.0
    await stage.reload(retries={"attempts": 0})
    stage.fault([*stage.prefill, *stage.decode], drop_reused=True, cut=cut)
    stale = await stage.change("eldrd_retries_total", cause="stale")
    opened = await stage.metric("eldrd_worker_breaker_opened")
    expected = (await stage.post(ask())).text
    for i in range(12):
        reply = await stage.post(ask(stream=i % 2 == 1))
        assert reply.whole
        assert reply.text == expected
    assert await stale() >= 6
    assert await stage.metric("eldrd_worker_breaker_opened") == opened


async def test_h1_workers_that_close_idle_connections(tmp_path: Path) -> None:
    """Idle limits of 50 ms at the workers, requests at about that distance."""
    async with EmulatedFleet(FleetSpec(prefill=1, decode=1, keepalive_s=0.05)) as fleet:
        listed = fleet.describe()
        eldrd = await Daemon(tmp_path, listed["prefill"], listed["decode"]).start()
        async with aiohttp.ClientSession() as http:
            stage = Stage(fleet, eldrd, http)
            for i in range(20):
                assert (await stage.post(ask(max_tokens=2))).whole
                await asyncio.sleep(0.045 + i * 0.0005)
        assert await eldrd.stop() == 0
    assert fleet.violations == []


@pytest.mark.parametrize("n", [200, 2000])
async def test_h2_many_parallel_streams(stage: Stage, n: int) -> None:
    """All are open at once: the workers answer none before the last has come."""
    await stage.reload(timeouts=dict.fromkeys(stage.base["timeouts"], 120.0))
    stage.fault(stage.decode, stall_at=0)
    tasks = [asyncio.create_task(stage.post(ask(8, stream=True, max_tokens=3))) for _ in range(n)]
    await until(lambda: sum(d.received for d in stage.decode) == n, 120.0)
    assert await stage.metric("eldrd_in_flight", role="decode") == n
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await stage.eldrd.until(stage.settled)
    stage.fault(stage.decode)
    replies = await asyncio.gather(*(stage.post(ask(8, stream=True, max_tokens=3)) for _ in range(n)))
    assert [(r.status, r.body[-200:]) for r in replies if not r.whole] == []


def with_image(size: int) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what is this"}, image]}],
        "max_tokens": 5,
    }


async def test_h3_body_of_eight_megabytes(stage: Stage) -> None:
    body = orjson.dumps(with_image(8 * 2**20))
    reply = await stage.post(body, CHAT)
    assert reply.whole
    (seen,) = [s for d in stage.decode for s in d.seen]
    assert seen[1].startswith(body[:-1])


async def test_h3_limit_is_a_setting(stage: Stage) -> None:
    await stage.reload(server={**stage.base["server"], "max_body_bytes": 2**20})
    reply = await stage.post(with_image(2 * 2**20), CHAT)
    assert reply.status == 413
    assert str(2**20) in reply.error["message"]
    assert (await stage.post(with_image(2**19), CHAT)).whole


@pytest.mark.parametrize("stream", [False, True])
async def test_h4_gzip_from_decode(stage: Stage, stream: bool) -> None:
    plain = await stage.post(ask(stream=stream))
    stage.fault(stage.decode, gzip=True)
    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.post(stage.eldrd.url + "/v1/completions", json=ask(stream=stream)) as r,
    ):
        body = await r.read()
        assert r.headers["Content-Encoding"] == "gzip"
        assert r.headers.get("Content-Length", str(len(body))) == str(len(body))
    reply = type(plain)(status=200, body=gzip.decompress(body))
    assert reply.whole
    assert reply.text == plain.text


async def test_h5_expect_continue(stage: Stage) -> None:
    body = orjson.dumps(ask(max_tokens=3))
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.eldrd.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    async with asyncio.timeout(60):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert b'"text_completion"' in await reader.read()
    writer.close()
    for worker in (*stage.prefill, *stage.decode):
        for headers, _ in worker.seen:
            assert "expect" not in {name.lower() for name in headers}


async def test_h6_workers_on_ipv6(tmp_path: Path) -> None:
    async with EmulatedFleet(FleetSpec(prefill=1, decode=1, host="::1")) as fleet:
        listed = fleet.describe()
        assert listed["decode"][0]["url"].startswith("http://[::1]:")
        eldrd = Daemon(tmp_path, listed["prefill"], listed["decode"])
        eldrd.sections["server"]["listen"] = f"[::1]:{eldrd.port}"
        eldrd.url = f"http://[::1]:{eldrd.port}"
        await eldrd.start()
        async with aiohttp.ClientSession() as http:
            assert (await Stage(fleet, eldrd, http).post(ask(stream=True))).whole
        assert await eldrd.stop() == 0
    assert fleet.violations == []


async def test_h7_preflight_needs_no_key(stage: Stage, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    origin = {"Origin": "https://chat.example.com", "Access-Control-Request-Method": "POST"}

    async def preflight(path: str = "/v1/chat/completions") -> tuple[int, str | None]:
        async with stage.http.options(stage.eldrd.url + path, headers=origin) as r:
            return r.status, r.headers.get("Access-Control-Allow-Origin")

    await stage.reload(auth={"client_keys_file": str(keys)})
    assert await preflight() == (401, None)
    await stage.reload(cors={"origins": ["https://chat.example.com"]})
    assert await preflight() == (204, "https://chat.example.com")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
        reply = await stage.post(ask(), **origin, **headers)
        assert reply.status == 401
        assert reply.error["type"] == "AuthenticationError"
    for n, stream in ((1, True), (1, False), (2, True)):
        reply = await stage.post(ask(stream=stream, n=n), **origin, Authorization="Bearer right")
        assert reply.whole
        assert reply.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
    await stage.reload(auth={"client_keys_file": ""}, cors={"origins": []})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("where", "faults", "limits", "phase"),
    [
        ("prefill", {"delay_s": 30.0}, {"prefill_s": 0.2}, "first_byte"),
        ("prefill", {"stall_at": 60}, {"prefill_s": 0.2}, "first_byte"),
        ("decode", {"stall_at": 0}, {"first_byte_s": 0.2}, "first_byte"),
        ("decode", {"delay_s": 30.0}, {"first_byte_s": 0.2}, "first_byte"),
    ],
)
async def test_h8_limits_before_an_answer(
    stage: Stage, where: str, faults: dict[str, float], limits: dict[str, float], phase: str, stream: bool
) -> None:
    await stage.reload(timeouts={**stage.base["timeouts"], **limits})
    stage.fault(getattr(stage, where), **faults)
    reply = await stage.post(ask(stream=stream))
    assert reply.status == 504
    assert phase in reply.error["message"]
    assert where in reply.error["message"]


async def test_h8_silence_inside_a_stream(stage: Stage) -> None:
    await stage.reload(timeouts={**stage.base["timeouts"], "idle_s": 0.3})
    stage.fault(stage.decode, stall_at=1200)
    counted = await stage.change("eldrd_requests_total", outcome="decode_lost_timeout")
    reply = await stage.post(ask(stream=True, max_tokens=200))
    assert reply.cut
    assert b"[DONE]" not in reply.body
    await stage.eldrd.until(stage.settled)
    assert await counted() == 1


async def test_h8_long_prefill_within_its_own_limit(stage: Stage) -> None:
    """Prefill may take longer than any of decode's limits, and nothing limits the whole."""
    await stage.reload(timeouts={**stage.base["timeouts"], "first_byte_s": 1.5, "idle_s": 1.5})
    stage.fault(stage.prefill, delay_s=2.0)
    assert (await stage.post(ask(stream=True))).whole
