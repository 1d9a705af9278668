"""Scenarios L1-L4, O1-O9: counts come back to zero, memory stays flat, and the process is run as operators run it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from stage import CHAT, COMPLETIONS, MODEL, Stage, ask, chat, until

from loadgen.daemon import Daemon
from loadgen.fleet import Faults

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def another(stage: Stage, folder: Path, **sections: dict[str, Any]) -> AsyncIterator[Stage]:
    """A second eldrd in front of the stage's fleet, to be stopped by its test or at the end."""
    listed = stage.fleet.describe()
    eldrd = Daemon(folder, listed["prefill"], listed["decode"])
    eldrd.configure(**sections)
    await eldrd.start()
    try:
        yield Stage(stage.fleet, eldrd, stage.http)
    finally:
        await eldrd.stop()


async def test_l1_worker_leaves_and_comes_back_under_load(stage: Stage) -> None:
    """Reloads take a worker away and bring it back while streams run on it and retries fail; no count goes below zero,
    all come back to it."""
    everyone = stage.base["decode"]["workers"]
    lowest = 0.0
    ended = asyncio.Event()

    async def watch() -> None:
        nonlocal lowest
        while not ended.is_set():
            for line in (await stage.eldrd.get("/metrics")).splitlines():
                if line.startswith(("eldrd_in_flight{", "eldrd_handoffs_open ", "eldrd_requests_running ")):
                    lowest = min(lowest, float(line.rsplit(" ", 1)[1]))
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    streams = [asyncio.create_task(stage.post(ask(20, stream=True, max_tokens=700))) for _ in range(12)]
    await until(lambda: stage.generated() == 12)
    for i in range(4):
        await stage.reload(decode={**stage.base["decode"], "workers": everyone[1:] if i % 2 == 0 else everyone})
        stage.fault(stage.decode[1:], refuse=True)
        await asyncio.gather(*(stage.post(ask(10)) for _ in range(6)))
        stage.fault(stage.decode[1:])
    replies = await asyncio.gather(*streams)
    ended.set()
    await watcher
    assert all(r.whole for r in replies)
    assert lowest == 0
    await stage.eldrd.until(stage.settled)


async def test_l2_stream_longer_than_every_limit(stage: Stage) -> None:
    """Each limit is 1.5 s, the stream takes 2.5 s and is never silent for long."""
    await stage.reload(timeouts=dict.fromkeys(stage.base["timeouts"], 1.5))
    stage.fault(stage.decode, pause_s=0.05)
    began = time.monotonic()
    reply = await stage.post(ask(stream=True, max_tokens=50))
    assert reply.whole
    assert len(reply.text.split()) == 50
    assert time.monotonic() - began > 2.4


async def test_l3_ties_rotate(stage: Stage) -> None:
    used = Counter([(await stage.post(ask(5, max_tokens=2))).headers["x-eldrd-decode"] for _ in range(30)])
    assert set(used) == {"d0", "d1", "d2"}
    assert min(used.values()) >= 5


def rss(stage: Stage) -> int:
    assert stage.eldrd.process is not None
    return int(Path(f"/proc/{stage.eldrd.process.pid}/statm").read_text().split()[1]) * 4096


async def test_l4_unique_prompts_leave_nothing(stage: Stage) -> None:
    """750 prompts of 4 KB between the two measurements would be 3 MB, and their hand-offs and answers more."""
    at = []
    for part in range(3):
        for batch in range(25):
            key = f"{part}-{batch}"
            replies = await asyncio.gather(
                *(stage.post(ask(prompt=f"{key}-{i}-{'x' * 4000}", max_tokens=1 + i % 2)) for i in range(30))
            )
            assert {r.status for r in replies} == {200}
        at.append(rss(stage))
    assert at[2] - at[1] < 2 << 20, at


@pytest.mark.parametrize("stream", [False, True])
async def test_o1_one_request_id_twice(stage: Stage, stream: bool) -> None:
    both = await asyncio.gather(*(stage.post(ask(stream=stream), X_Request_Id="mine") for _ in range(2)))
    ids = {orjson.loads(r.events[0])["id"] if stream else r.json["id"] for r in both}
    assert len(ids) == 2
    assert all("mine" not in i for i in ids)
    assert [r.headers["x-request-id"] for r in both] == ["mine", "mine"]
    sent = [h["X-Request-Id"] for w in (*stage.prefill, *stage.decode) for h, _ in w.seen]
    # One on each leg, the same on both of a request.
    assert sorted(Counter(sent).values()) == [2, 2]
    assert "mine" not in sent


async def test_o2_prefill_restarts_between_the_legs(stage: Stage, tmp_path: Path) -> None:
    """Hand-offs of the engine that is gone fail at once and are not tried on others; later ones are served."""
    await stage.reload(capture={"dir": str(tmp_path / "capture")}, signatures={"wait_ms": 3000})
    before = [p.engine.ledger.engine_id for p in stage.prefill]
    tasks = [asyncio.create_task(stage.post(ask(20))) for _ in range(4)]

    async def taken() -> bool:
        """All four answers have come: a prefill that is cut off before would be tried again."""
        return len((await stage.eldrd.get("/admin/handoffs"))["open"]) == 4

    await stage.eldrd.until(taken)
    for p in stage.prefill:
        await p.stop()
        await p.start()
    assert not {p.engine.ledger.engine_id for p in stage.prefill} & set(before)
    began = time.monotonic()
    replies = await asyncio.gather(*tasks)
    assert time.monotonic() - began < 0.8 * stage.base["timeouts"]["first_byte_s"]
    # 503 where a probe came just while the servers were down.
    assert {r.status for r in replies} <= {500, 503}
    assert {v.kind for v in stage.fleet.violations} == {"unknown_engine"}
    stage.fleet.violations.clear()
    await stage.reload(capture={"dir": ""})
    await stage.eldrd.until(stage.settled)
    assert (await stage.post(ask(20))).whole


async def test_o3_first_workers_are_down_from_the_start(stage: Stage, tmp_path: Path) -> None:
    await stage.prefill[0].stop()
    await stage.decode[0].stop()
    async with another(stage, tmp_path) as fresh:
        assert [m["id"] for m in (await fresh.eldrd.get("/v1/models"))["data"]] == [MODEL]
        assert (await fresh.post(ask())).whole
    # The running one goes on as well.
    assert [m["id"] for m in (await stage.eldrd.get("/v1/models"))["data"]] == [MODEL]
    assert (await stage.post(ask())).whole


async def test_o4_keys_of_workers_and_of_clients(stage: Stage, tmp_path: Path) -> None:
    """The workers' key is on every call (prefill, decode, release, models); the clients' goes no further than eldrd."""
    client_keys, worker_key = tmp_path / "client-keys", tmp_path / "worker-key"
    client_keys.write_text("client-one\nclient-two\n")
    worker_key.write_text("worker-secret\n")
    workers = (*stage.prefill, *stage.decode)
    try:
        for worker in workers:
            worker.api_key = "worker-secret"
        async with another(
            stage, tmp_path, auth={"client_keys_file": str(client_keys), "worker_key_file": str(worker_key)}
        ) as own:
            for key in ("client-one", "client-two"):
                assert (await own.post(ask(), Authorization=f"Bearer {key}")).whole
            assert (await own.post(ask())).status == 401
            async with stage.http.get(
                own.eldrd.url + "/v1/models", headers={"Authorization": "Bearer client-one"}
            ) as r:
                assert [m["id"] for m in (await r.json())["data"]] == [MODEL]
            stage.fault(stage.decode, status=400)
            assert (await own.post(ask(), Authorization="Bearer client-one")).status == 400
            await until(lambda: stage.fleet.pinned == 0)
            assert stage.ends() == {"consumed": 2, "released": 1}
            # The process has ended when the block has: its log is whole.
            log = own.eldrd.log.read_text()
    finally:
        for worker in workers:
            worker.api_key = ""
    sent = [headers for w in workers for headers, _ in w.seen]
    assert len(sent) >= 7
    assert {h["Authorization"] for h in sent} == {"Bearer worker-secret"}
    assert not any("client-" in v for h in sent for v in h.values())
    assert not any(key in log for key in ("client-one", "client-two", "worker-secret"))


async def test_o5_series_of_a_removed_worker_go(stage: Stage) -> None:
    for _ in range(6):
        assert (await stage.post(ask(5, stream=True))).whole
    assert 'worker="d2"' in await stage.eldrd.get("/metrics")
    await stage.reload(decode={**stage.base["decode"], "workers": stage.base["decode"]["workers"][:2]})
    assert 'worker="d2"' not in await stage.eldrd.get("/metrics")
    assert 'worker="d1"' in await stage.eldrd.get("/metrics")


async def test_o5_names_from_clients_make_no_series(stage: Stage) -> None:
    await stage.post(ask(model="fake"))
    await stage.post(b"{}", "/fake")

    async def series() -> int:
        return len((await stage.eldrd.get("/metrics")).splitlines())

    before = await series()
    for i in range(200):
        replies = await asyncio.gather(
            stage.post(ask(model=f"fake-{i}")),
            stage.post(ask(), f"/v1/fake-{i}"),
            stage.post(ask(5, max_tokens=1), X_Eldrd_Label=f"fake-{i}"),
        )
        assert [r.status for r in replies[:2]] == [404, 404]
    assert abs(await series() - before) < 20
    text = await stage.eldrd.get("/metrics")
    assert "fake-" not in text


async def test_o6_sigterm_in_the_middle_of_a_stream(stage: Stage, tmp_path: Path) -> None:
    """/ready fails while the listener is still open; the stream ends whole; then the process ends with status 0."""
    async with another(stage, tmp_path, drain={"delay_s": 2.0, "timeout_s": 60.0}) as own:
        task = asyncio.create_task(own.post(ask(stream=True, max_tokens=1500)))
        await until(lambda: any(d.engine.decode.running for d in stage.decode))
        own.eldrd.signal(signal.SIGTERM)

        async def unready() -> bool:
            async with stage.http.get(own.eldrd.url + "/ready") as r:
                return r.status == 503

        await own.eldrd.until(unready)
        assert (await own.post(ask(5))).whole
        reply = await task
        assert reply.whole
        assert len(reply.text.split()) == 1500
        assert own.eldrd.process is not None
        assert await asyncio.wait_for(own.eldrd.process.wait(), 60) == 0


async def test_o6_drain_has_a_deadline(stage: Stage, tmp_path: Path) -> None:
    stage.fault(stage.decode, pause_s=0.05)
    async with another(stage, tmp_path, drain={"timeout_s": 0.5}) as own:
        task = asyncio.create_task(own.post(ask(stream=True, max_tokens=400)))
        await until(lambda: any(d.engine.decode.running for d in stage.decode))
        began = time.monotonic()
        own.eldrd.signal(signal.SIGTERM)
        assert own.eldrd.process is not None
        assert await asyncio.wait_for(own.eldrd.process.wait(), 60) == 0
        # The stream alone would take 20 s.
        assert 0.4 < time.monotonic() - began < 15.0
        reply = await task
        assert reply.cut
        assert b"[DONE]" not in reply.body
        # The log does not say that the client has left.
        assert [(r["outcome"], r["status"]) for r in own.eldrd.lines("request")] == [("drain_over", 503)]
        assert [line["unfinished"] for line in own.eldrd.lines("stopped")] == [1]


async def test_o7_no_worker_is_503(stage: Stage) -> None:
    for d in stage.decode:
        await d.stop()
    reply = await stage.post(ask())
    assert reply.status == 503
    assert reply.error["type"] == "ServiceUnavailableError"
    assert int(reply.headers["Retry-After"]) >= 1


async def test_o7_full_queue_is_429(stage: Stage) -> None:
    await stage.reload(limits={"requests": 2, "queue": 1})
    stage.fault(stage.decode, stall_at=0)
    running = [asyncio.create_task(stage.post(ask())) for _ in range(2)]
    await until(lambda: sum(d.received for d in stage.decode) == 2)
    waiting = asyncio.create_task(stage.post(ask()))

    async def queued() -> bool:
        return await stage.metric("eldrd_requests_running") == 3

    await stage.eldrd.until(queued)
    reply = await stage.post(ask())
    assert reply.status == 429
    assert reply.error["type"] == "TooManyRequestsError"
    assert int(reply.headers["Retry-After"]) >= 1
    # Clients that leave make room, also one that was waiting.
    stage.fault(stage.decode)
    running[0].cancel()
    assert (await waiting).whole
    running[1].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await stage.reload(limits={"requests": 0})


@pytest.mark.parametrize("stream", [False, True])
async def test_o8_model_alias(stage: Stage, tmp_path: Path, stream: bool) -> None:
    """Workers know their own name alone and would answer 404 to another; clients see the one they asked for."""
    own = Daemon(tmp_path, stage.base["prefill"]["workers"], stage.base["decode"]["workers"])
    own.models = [{"name": MODEL, "aliases": ["nice"]}]
    await own.start()
    try:
        for path, body in ((COMPLETIONS, ask()), (CHAT, chat(max_tokens=5)), (COMPLETIONS, ask(max_tokens=1))):
            for name in (MODEL, "nice"):
                reply = await stage.post({**body, "model": name, "stream": stream}, path, url=own.url)
                assert reply.whole, reply.body
                answers = [orjson.loads(e) for e in reply.events if e != b"[DONE]"] if stream else [reply.json]
                assert {a["model"] for a in answers} == {name}
        assert {m["id"] for m in (await own.get("/v1/models"))["data"]} == {MODEL, "nice"}
        assert (await stage.post(ask(model="nasty"), url=own.url)).status == 404
    finally:
        assert await own.stop() == 0
    assert {orjson.loads(b)["model"] for w in (*stage.prefill, *stage.decode) for _, b in w.seen} == {MODEL}


async def test_o9_nothing_of_a_request_is_logged(stage: Stage) -> None:
    """Prompt, completion, names and keys carry a marker through every kind of failure; no log line has it."""
    marker = "xyzzymarker"
    before = stage.eldrd.lines("request")
    more: dict[str, Any] = {"prompt": f"{marker} is secret", "stop": [marker], "user": marker, "max_tokens": 60}
    faults: list[dict[str, Any]] = [
        {}, {"status": 400}, {"status": 500}, {"refuse": True}, {"die_after_chunks": 2}, {"cut_at": 40},
        {"cut_at": 900, "cut": "close"}, {"wrong_params": True}, {"drop_params": True}, {"first_text": marker},
    ]  # fmt: skip
    for where in (stage.prefill, stage.decode):
        for fault in faults:
            for worker in where:
                worker.faults = Faults(**fault)
            await stage.post(ask(stream=True, **more), Authorization=f"Bearer {marker}", X_Eldrd_Label=marker)
        stage.fault(where)
    for body in (
        b'{"prompt": "%b',
        b'{"model": "%b", "prompt": "a"}',
        b'{"messages": "%b"}',
        b'{"prompt":"%b","n":"x"}',
    ):
        await stage.post(body % marker.encode())
        await stage.post(body % marker.encode(), CHAT)
    await stage.post(ask(), f"/{marker}?{marker}")
    await stage.post(chat(max_tokens=3, user=marker), CHAT)
    await stage.post(ask(5, max_tokens=2), COMPLETIONS)
    await stage.eldrd.logged("request", len(before) + 2 * len(faults))
    log = stage.eldrd.log.read_text()
    assert '"request"' in log
    assert marker not in log
    assert marker not in await stage.eldrd.get("/metrics")
    stage.fleet.violations.clear()
