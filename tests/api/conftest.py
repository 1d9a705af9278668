"""The API over the real lifecycle, in the test's loop, between scripted workers and raw client sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import traceback
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import uvloop

from eldrd.api.admin import Admin
from eldrd.api.app import App
from eldrd.config import Settings
from eldrd.fleet.pool import IdleWatch
from eldrd.fleet.table import LoadTable, Pool
from eldrd.fleet.worker import Worker
from eldrd.handoff.admission import Admission
from eldrd.handoff.ledger import Ledger
from eldrd.handoff.lifecycle import Lifecycle
from eldrd.handoff.snapshot import Snapshot
from eldrd.routing import build as routing
from eldrd.signatures.cache import SignatureCache
from eldrd.signatures.receiver import SignatureReceiver
from eldrd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[["Exchange"], Awaitable[None]]

PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [1]}
PREFILLED = {
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}, "kv_transfer_params": PARAMS,
}  # fmt: skip


class Exchange:
    """One request that a scripted worker got, and the means to answer it."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self.writer = writer

    async def write(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)

    async def json(self, value: Any, status: int = 200) -> None:
        body = orjson.dumps(value)
        fields = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        await self.write(b"HTTP/1.1 %d X\r\n%b\r\n" % (status, fields) + body)


class ScriptedWorker:
    """Answers each request by ``script``; keeps them all; ``gone`` counts connections that the router ended."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.exchanges: list[Exchange] = []
        self.gone = 0
        self.url = ""
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        assert self._listener is not None
        self._listener.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # uvloop's writer raises RuntimeError once the peer has gone.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, RuntimeError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                exchange = Exchange(head, await reader.readexactly(length), writer)
                self.exchanges.append(exchange)
                await self.script(exchange)
        self.gone += 1
        writer.close()


async def prefills(exchange: Exchange) -> None:
    await exchange.json(PREFILLED)


async def streams(exchange: Exchange) -> None:
    await exchange.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        b"9\r\ndata: a\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    )


class Stack:
    """The API on a loopback port. P and D: the scripted workers. errors: what reached the loop's exception handler."""

    prefilled = PREFILLED

    def __init__(self, **sections: Any) -> None:
        self.P, self.D = ScriptedWorker(prefills), ScriptedWorker(streams)
        self.sections = sections
        self.errors: list[dict[str, Any]] = []
        self.table = LoadTable()
        self.metrics = Metrics()
        self.outcomes: list[str] = []
        self.ledger = Ledger(self.outcomes.append)
        self.watch = IdleWatch(30.0)
        self.port = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.errors.append(context))
        for w in (self.P, self.D):
            await w.start()
        settings = Settings(
            prefill={"workers": [{"name": "p0", "url": self.P.url}]},
            decode={"workers": [{"name": "d0", "url": self.D.url}]},
            **self.sections,
        )
        self.workers = [
            Worker(self.table, "prefill", "p0", self.P.url, 1.0),
            Worker(self.table, "decode", "d0", self.D.url, 1.0),
        ]
        for w in self.workers:
            w.probed(True, 1)
        self.snapshot = Snapshot(
            generation=1,
            settings=settings,
            prefill=Pool(self.table, (self.workers[0],)),
            decode=Pool(self.table, (self.workers[1],)),
            prefill_policy=routing.build_prefill("jsq", workers=["p0"]),
            decode_policy=routing.build("jsq", partition=None, workers=["d0"], tau=0.1),
            partition=None,
        )
        cache = SignatureCache(1 << 20)
        receiver = SignatureReceiver(cache, self.metrics)
        self.lifecycle = Lifecycle(
            self.table, self.ledger, receiver, self.watch, self.metrics, lambda *_: None
        )  # fmt: skip
        self.admission = Admission()
        admin = Admin(lambda: self.snapshot, self.table, self.ledger, receiver, cache)
        self.app = App(self.lifecycle, self.admission, admin, self.metrics, lambda: self.snapshot)
        self.server = self.app.server()
        self.listener = await loop.create_server(self.server, "127.0.0.1", 0)
        self.port = self.listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.listener.close()
        await self.server.shutdown(0.2)
        await self.lifecycle.releaser.close(2.0)
        for w in self.workers:
            w.pool.close()
        self.P.stop()
        self.D.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110, nothing tells
                await asyncio.sleep(0.002)

    async def settled(self) -> None:
        """Everything that requests hold has been given back."""
        await self.until(lambda: not (self.app.running or len(self.ledger) or len(self.lifecycle.releaser)))
        await self.until(lambda: int(self.table.in_flight.sum()) == 0)
        assert len(self.watch) == 0

    async def connect(self, limit: int = 1 << 16) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=limit))


class Client:
    """A raw client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, body: bytes, *fields: bytes, path: bytes = b"/v1/completions", version: bytes = b"1.1") -> None:
        lines = b"".join(f + b"\r\n" for f in fields)
        length = b"content-length: %d\r\n" % len(body)
        self.writer.write(b"POST %b HTTP/%b\r\nhost: x\r\n%b%b\r\n%b" % (path, version, length, lines, body))

    def ask(self, *fields: bytes, version: bytes = b"1.1", **more: Any) -> None:
        """A completion request."""
        body = {"model": "m", "prompt": "abc", "stream": True, **more}
        self.send(orjson.dumps(body), *fields, version=version)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)

    async def answer(self) -> tuple[int, bytes, bytes]:
        """Status, head and raw body of one whole answer."""
        head = await self.head()
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            body = await asyncio.wait_for(self.reader.readuntil(b"0\r\n\r\n"), 30)
        elif b"content-length:" in lower:
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            body = await asyncio.wait_for(self.reader.readexactly(length), 30)
        else:
            body = await self.rest()
        return int(head.split()[1]), head, body

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 30)

    def close(self) -> None:
        self.writer.transport.abort()


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The daemon runs on uvloop, whose transports differ in what they forgive."""
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


@pytest.fixture
def sections() -> dict[str, Any]:
    """Configuration sections of ``stack``; a test overrides them by parametrizing this."""
    return {}


@pytest.fixture
async def stack(sections: dict[str, Any]) -> AsyncIterator[Stack]:
    stack = Stack(**sections)
    await stack.start()
    yield stack
    await stack.settled()
    await stack.stop()
    gc.collect()
    await asyncio.sleep(0)
    assert stack.errors == [], chr(10).join(
        "".join(traceback.format_exception(e["exception"])) for e in stack.errors[:1]
    )
