"""What becomes of a prefill whose client has gone: seen through, ended, or given back though it answered in that moment."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import orjson
import pytest

from eldrd.config import Settings
from eldrd.fleet import vllm
from eldrd.fleet.table import LoadTable, Pool
from eldrd.fleet.worker import Worker
from eldrd.handoff import release as module
from eldrd.handoff.ledger import Ledger
from eldrd.handoff.release import Releaser
from eldrd.handoff.snapshot import Snapshot
from eldrd.routing.load import ShortestQueue
from eldrd.routing.prefill import ByLoad

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from eldrd.handoff.ledger import Outcome

    Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "e7"}
ANSWER = orjson.dumps({"choices": [{"text": "a", "finish_reason": "length"}], vllm.TRANSFER: PARAMS})
REFUSAL = b'{"error":{"message":"no such model","code":404}}'


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Case:
    """A prefill worker that answers as ``prefill`` says, and a decode worker that refuses every model."""

    def __init__(self) -> None:
        self.ended: list[Outcome] = []
        self.released: list[dict[str, object]] = []
        self.asked: list[str] = []
        self.prefill: Answering
        self.seen = asyncio.Event()

    async def start(self) -> None:
        scripts = (self._prefill, self._decode, self._decode)
        self.servers = [await asyncio.start_server(s, "127.0.0.1", 0) for s in scripts]
        self.table = table = LoadTable()
        urls = [f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in self.servers]
        roles = (("prefill", "p0"), ("decode", "d0"), ("decode", "d1"))
        self.p0, self.d0, self.d1 = (Worker(table, r, n, u, 1.0) for (r, n), u in zip(roles, urls, strict=True))  # type: ignore[arg-type]
        for worker in (self.p0, self.d0, self.d1):
            worker.probed(True, 1)
        workers = [{"name": name, "url": url} for (_, name), url in zip(roles, urls, strict=True)]
        settings = Settings(prefill={"workers": workers[:1]}, decode={"workers": workers[1:]})
        pools = Pool(table, (self.p0,)), Pool(table, (self.d0, self.d1))
        load = ShortestQueue()
        self.snap = Snapshot(1, settings, *pools, ByLoad(load), load, None)
        self.ledger = Ledger(self.ended.append)
        self.releaser = Releaser(self.ledger)

    async def _prefill(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        await self.prefill(reader, writer)
        writer.close()

    async def _decode(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                self.asked.append(head.split(b"host: ")[1].split(b"\r\n")[0].decode())
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                self.released.append(orjson.loads(await reader.readexactly(length)))
                writer.write(whole(404, REFUSAL))
        writer.close()

    async def leave(self) -> None:
        """A prefill is under way, and its client leaves."""
        connection = await self.p0.pool.get()
        waiting = connection.send([b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n", b"{}"], 60.0)
        await asyncio.sleep(0)
        waiting.cancel()
        self.releaser.adopt(connection, "r0", self.p0, self.table.lease(self.p0), self.snap)
        await self.releaser.close(30)
        # The hand-off is given back by a task of its own.
        await self.releaser.close(30)


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    c = Case()
    await c.start()
    yield c
    c.p0.pool.close()
    c.d0.pool.close()
    c.d1.pool.close()
    for server in c.servers:
        server.close()


async def test_an_answer_within_the_grace_is_given_back_and_the_connection_kept(case: Case) -> None:
    async def prefill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, ANSWER))
        await reader.read()

    case.prefill = prefill
    await case.leave()
    assert case.ended == ["released"]
    assert [r[vllm.TRANSFER] for r in case.released] == [PARAMS]
    assert case.p0.pool.pop() is not None
    assert case.table.cells[case.p0.slot] == 0


async def test_a_prefill_that_goes_on_is_ended(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)

    async def prefill(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        case.seen.set()

    case.prefill = prefill
    await case.leave()
    await asyncio.wait_for(case.seen.wait(), 30)
    assert (case.ended, case.released, len(case.ledger)) == ([], [], 0)
    assert case.p0.pool.pop() is None
    assert case.table.cells[case.p0.slot] == 0


@pytest.mark.parametrize("pieces", [1, 2])
async def test_an_answer_on_its_way_when_the_prefill_is_ended_is_given_back(
    case: Case, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """P has answered and holds the blocks, eldrd has stopped waiting: neither knows of the other yet."""
    monkeypatch.setattr(module, "GRACE_S", 0.05)

    async def prefill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = whole(200, ANSWER)
        if pieces == 2:
            writer.write(answer[:80])
        assert await reader.read() == b""
        writer.write(answer if pieces == 1 else answer[80:])

    case.prefill = prefill
    await case.leave()
    assert case.ended == ["released"]
    assert [r[vllm.TRANSFER] for r in case.released] == [PARAMS]
    assert case.p0.pool.pop() is None
    assert case.table.cells[case.p0.slot] == 0


async def test_a_decode_server_that_knows_the_engine_is_preferred(case: Case) -> None:
    """Another one would have to shake hands first; where none knows it, any may try."""
    for met, asked in ((case.d1, case.d1), (case.d1, case.d1), (case.d0, case.d0), (None, None)):
        for worker in (case.d0, case.d1):
            worker.met = {"e7"} if worker is met else {"e6"}
        hand_off = case.ledger.open("r0", "p0", PARAMS, 0.0)
        case.releaser.release(hand_off, case.snap)
        await case.releaser.close(30)
        assert hand_off.outcome == "released"
        if asked is not None:
            assert case.asked[-1] == asked.pool.netloc.decode()
    assert len(case.asked) == 4
    case.d1.met = {"e7"}
    case.d1.probed(False, 1)
    assert case.d1.met == set()
