"""Faults of the emulated fleet: each does to the bytes, the contents and the ledger what it says."""

from __future__ import annotations

import asyncio
import gzip
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest

from loadgen.fleet import EmulatedFleet, Faults, FleetSpec
from loadgen.fleet.decode import StepCost
from loadgen.fleet.prefill import PrefillCost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from loadgen.fleet import Worker

ASK = {"prompt": "a b c", "max_tokens": 12, "ignore_eos": True}
ASK_P = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
async def fleet() -> AsyncIterator[EmulatedFleet]:
    spec = FleetSpec(
        prefill=1,
        decode=1,
        step_cost=StepCost(0.0005, 0, 0),
        prefill_cost=PrefillCost(0.0005, 0),
        lease_s=5.0,
        journal=True,
        keepalive_s=0.1,
    )
    async with EmulatedFleet(spec) as fleet:
        yield fleet


async def raw(worker: Worker, body: dict[str, Any], patience_s: float = 60.0) -> tuple[list[bytes], str]:
    """The reads of one answer as they come and how it ended: ``eof``, ``reset`` or ``silence``."""
    data = orjson.dumps(body)
    reader, writer = await asyncio.open_connection(worker.spec.host, worker.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    reads: list[bytes] = []
    try:
        while True:
            part = await asyncio.wait_for(reader.read(65536), patience_s)
            if not part:
                return reads, "eof"
            reads.append(part)
    except ConnectionResetError:
        return reads, "reset"
    except TimeoutError:
        return reads, "silence"
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("cut", "ending"), [("reset", "reset"), ("close", "eof")])
@pytest.mark.parametrize("at", [0, 1, 30, 250])
async def test_cut_at(fleet: EmulatedFleet, at: int, cut: Any, ending: str, stream: bool) -> None:
    d = fleet.decode[0]
    whole, _ = await raw(d, {**ASK, "stream": stream})
    d.faults = Faults(cut_at=at, cut=cut)
    reads, how = await raw(d, {**ASK, "stream": stream})
    assert how == ending
    assert len(b"".join(reads)) == at
    assert b"".join(reads)[:30] == b"".join(whole)[: min(at, 30)]


async def test_stall_at(fleet: EmulatedFleet) -> None:
    d = fleet.decode[0]
    d.faults = Faults(stall_at=100)
    reads, how = await raw(d, ASK, patience_s=1.0)
    assert (len(b"".join(reads)), how) == (100, "silence")


async def test_split_and_pause(fleet: EmulatedFleet) -> None:
    d = fleet.decode[0]
    whole, _ = await raw(d, {**ASK, "stream": True})
    d.faults = Faults(split=100, pause_s=0.005)
    began = time.monotonic()
    reads, how = await raw(d, {**ASK, "stream": True})
    assert how == "eof"
    assert max(map(len, reads)) <= 200
    assert len(reads) > 5
    assert time.monotonic() - began > 0.05
    assert b"".join(reads).count(b"data: ") == b"".join(whole).count(b"data: ")


async def test_chunk(fleet: EmulatedFleet) -> None:
    d = fleet.decode[0]
    d.faults = Faults(chunk=1, first_text="é")
    reads, _ = await raw(d, {**ASK, "max_tokens": 2, "stream": True})
    body = b"".join(reads).partition(b"\r\n\r\n")[2]
    assert body.startswith(b"1\r\nd\r\n1\r\na\r\n1\r\nt\r\n")
    assert b"1\r\n\xc3\r\n1\r\n\xa9\r\n" in body


@pytest.mark.parametrize("inside", [False, True])
async def test_die(fleet: EmulatedFleet, inside: bool) -> None:
    d = fleet.decode[0]
    d.faults = Faults(die_after_chunks=3, die_inside=inside)
    reads, how = await raw(d, {**ASK, "max_tokens": 50, "stream": True})
    body = b"".join(reads)
    assert how == "reset"
    assert 3 <= body.count(b'"text"') < 50
    assert body.endswith(b'40\r\ndata: {"id"' if inside else b"\n\n\r\n")


async def test_connections_in_use_and_idle(fleet: EmulatedFleet) -> None:
    """drop_reused lets a first request pass and ends the second; keepalive_s closes what is idle."""
    d = fleet.decode[0]
    d.faults = Faults(drop_reused=True)
    data = orjson.dumps(ASK)
    request = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
    reader, writer = await asyncio.open_connection(d.spec.host, d.port)
    writer.write(request)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await reader.readuntil(b"}}")
    writer.write(request)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readuntil(b"HTTP/1.1 200")
    reader, idle = await asyncio.open_connection(d.spec.host, d.port)
    d.faults = Faults()
    idle.write(request)
    await asyncio.wait_for(reader.read(), 60)
    idle.close()


async def test_listener_closes_and_opens_on_its_port(fleet: EmulatedFleet) -> None:
    d = fleet.decode[0]
    port = d.port
    d.unlisten()
    with pytest.raises(ConnectionRefusedError):
        await raw(d, ASK)
    await d.listen()
    assert d.port == port
    assert (await raw(d, ASK))[1] == "eof"


@pytest.mark.parametrize("stream", [False, True])
async def test_gzip(fleet: EmulatedFleet, stream: bool) -> None:
    d = fleet.decode[0]
    d.faults = Faults(gzip=True)
    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.post(d.url + "/v1/completions", json={**ASK, "stream": stream}, headers={"X-Request-Id": "x"}) as r,
    ):
        assert r.headers["Content-Encoding"] == "gzip"
        body = gzip.decompress(await r.read())
    assert body == bytes(d.journal["x"].body)
    assert d.journal["x"].whole


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110, nothing tells
            await asyncio.sleep(0.005)


async def hand_off(http: aiohttp.ClientSession, fleet: EmulatedFleet) -> dict[str, Any]:
    body = {**ASK, "max_tokens": 1, "kv_transfer_params": ASK_P}
    async with http.post(fleet.prefill[0].url + "/v1/completions", json=body) as r:
        params: dict[str, Any] = (await r.json())["kv_transfer_params"]
    assert fleet.pinned == 1
    return params


@pytest.mark.parametrize(
    ("change", "status"), [({"model": "other"}, 404), ({"max_tokens": 99_999}, 400), ({"prompt": 5}, 400)]
)
async def test_rejected_by_decode_is_released(fleet: EmulatedFleet, change: dict[str, Any], status: int) -> None:
    ledger = fleet.prefill[0].engine.ledger
    async with aiohttp.ClientSession() as http:
        body = {**ASK, "kv_transfer_params": await hand_off(http, fleet), **change}
        for n in range(2):
            async with http.post(fleet.decode[0].url + "/v1/completions", json=body) as r:
                assert r.status == status
            # Once more changes nothing and is counted.
            assert (ledger.pinned, dict(ledger.ends), ledger.idle_releases) == (0, {"released": 1}, n)
    assert fleet.prefill[0].engine.pool.usage == 0
    assert fleet.violations == []


async def test_server_error_releases_nothing(fleet: EmulatedFleet) -> None:
    fleet.decode[0].faults = Faults(status=503)
    async with aiohttp.ClientSession() as http:
        body = {**ASK, "kv_transfer_params": await hand_off(http, fleet)}
        async with http.post(fleet.decode[0].url + "/v1/completions", json=body) as r:
            assert r.status == 503
    assert fleet.pinned == 1


@pytest.mark.parametrize(("faults", "end"), [({"delay_s": 5.0}, "released"), ({"stall_at": 0}, "consumed")])
async def test_client_that_leaves_decode_frees_prefill(fleet: EmulatedFleet, faults: dict[str, Any], end: str) -> None:
    """Before the engine has seen the request as a rejection, afterwards as an aborted one."""
    fleet.decode[0].faults = Faults(**faults)
    async with aiohttp.ClientSession() as http:
        d = fleet.decode[0]
        body = {**ASK, "kv_transfer_params": await hand_off(http, fleet), "max_tokens": 1000}
        asked = asyncio.create_task(http.post(d.url + "/v1/completions", json=body))
        await until(lambda: bool(d.engine.decode.running if end == "consumed" else d.received))
        asked.cancel()
        await until(lambda: not (fleet.pinned or d.engine.decode.running))
    assert dict(fleet.prefill[0].engine.ledger.ends) == {end: 1}


async def test_first_token_that_ends_is_pinned_all_the_same(fleet: EmulatedFleet) -> None:
    fleet.prefill[0].faults = Faults(finish_first=True)
    body = {**ASK, "kv_transfer_params": ASK_P}
    async with aiohttp.ClientSession() as http, http.post(fleet.prefill[0].url + "/v1/completions", json=body) as r:
        answer = await r.json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True
    assert fleet.pinned == 1


async def test_draw_gives_each_request_its_own(fleet: EmulatedFleet) -> None:
    drawn = iter([Faults(status=400), Faults(), Faults(status=503)])
    fleet.decode[0].draw = lambda: next(drawn)
    statuses = [int((await raw(fleet.decode[0], ASK))[0][0].split()[1]) for _ in range(3)]
    assert statuses == [400, 200, 503]
    assert fleet.decode[0].received == 3
