"""What the scenario tests share: one fleet and one eldrd a file, requests with every byte at hand, and a clean slate."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from multidict import CIMultiDict

from loadgen.fleet import Faults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from loadgen.daemon import Daemon
    from loadgen.fleet import EmulatedFleet, Worker

MODEL = "emulated-moe"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def ask(words: int = 40, /, **more: Any) -> dict[str, Any]:
    """A completion request with a prompt of so many words; 12 tokens, unless ``more`` says otherwise."""
    return {
        "model": MODEL,
        "prompt": " ".join(f"w{i}" for i in range(words)),
        "max_tokens": 12,
        "ignore_eos": True,
        **more,
    }


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "a b c"}], "ignore_eos": True, **more}


@dataclass
class Reply:
    """An answer as far as it came. cut: the connection ended before the message did; arrivals: when each read of the body
    came, loop seconds."""

    status: int = 0
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""
    cut: bool = False
    arrivals: list[float] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object that this answer is."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error

    @property
    def events(self) -> list[bytes]:
        """The payloads of a stream's events; the last may be cut."""
        return [e.removeprefix(b"data: ") for e in self.body.split(b"\n\n") if e]

    @property
    def text(self) -> str:
        """What was generated, of any kind of answer."""
        if not self.body.startswith(b"data: "):
            choice = self.json["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        parts = [orjson.loads(e)["choices"] for e in self.events if e != b"[DONE]"]
        return "".join(c[0].get("text", "") or c[0].get("delta", {}).get("content", "") for c in parts if c)

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.cut and (b"[DONE]" in self.events if self.body[:1] == b"d" else True)


class Stage:
    """A fleet and an eldrd in front of it. Decode worker ``d`` is the first of three."""

    def __init__(self, fleet: EmulatedFleet, eldrd: Daemon, http: aiohttp.ClientSession) -> None:
        self.fleet, self.eldrd, self.http = fleet, eldrd, http
        self.base = {name: dict(keys) for name, keys in eldrd.sections.items()}

    @property
    def prefill(self) -> list[Worker]:
        return self.fleet.prefill

    @property
    def decode(self) -> list[Worker]:
        return self.fleet.decode

    async def post(self, body: Any, path: str = COMPLETIONS, url: str = "", **headers: str) -> Reply:
        """Send a body (bytes as they are) to eldrd, or to ``url``, and take all that comes back. Raises
        aiohttp.ClientError if no answer begins."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        reply = Reply()
        got = bytearray()
        async with self.http.post((url or self.eldrd.url) + path, data=data, headers=headers) as r:
            reply.status, reply.headers = r.status, CIMultiDict(r.headers)
            try:
                async for part in r.content.iter_any():
                    got += part
                    reply.arrivals.append(asyncio.get_running_loop().time())
            except (aiohttp.ClientPayloadError, ConnectionError):
                reply.cut = True
        reply.body = bytes(got)
        return reply

    async def leave(self, body: dict[str, Any], after: float | Callable[[], bool], path: str = COMPLETIONS) -> None:
        """Send a request and close the connection after a time, or once something is so."""
        task = asyncio.create_task(self.post(body, path))
        if callable(after):
            await until(after)
        else:
            await asyncio.sleep(after)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def raw(self, *parts: bytes, until_bytes: bytes | None = None) -> bytes:
        """Bytes on a connection of their own, and what comes back until it is closed or ends with ``until_bytes``."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.eldrd.port)
        got = b""
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(60):
                while until_bytes is None or not got.endswith(until_bytes):
                    data = await reader.read(65536)
                    if not data:
                        break
                    got += data
        finally:
            writer.close()
        return got

    async def metric(self, name: str, **labels: str) -> float:
        return await self.eldrd.metric(name, **labels)

    async def change(self, name: str, **labels: str) -> Callable[[], Awaitable[float]]:
        """How much a metric has grown since now."""
        before = await self.metric(name, **labels)

        async def grown() -> float:
            return await self.metric(name, **labels) - before

        return grown

    async def reload(self, **sections: dict[str, Any]) -> None:
        """Change eldrd's configuration until the test's end."""
        failed = await self.metric("eldrd_reloads_total", outcome="failed")
        await self.eldrd.reload(**sections)
        assert await self.metric("eldrd_reloads_total", outcome="failed") == failed

    def ends(self) -> dict[str, int]:
        """How the hand-offs ended that the running prefill engines gave."""
        ends: dict[str, int] = {}
        for worker in self.prefill:
            for how, n in worker.engine.ledger.ends.items():
                ends[how] = ends.get(how, 0) + n
        return ends

    def generated(self) -> int:
        """Requests that the decode workers' engines have taken up."""
        return sum(w.engine.finished.total() + w.engine.decode.running + w.engine.decode.waiting for w in self.decode)

    def fault(self, workers: list[Worker], **faults: Any) -> None:
        for worker in workers:
            worker.faults = Faults(**faults)

    async def settled(self) -> bool:
        """Nothing is under way, every worker is usable."""
        text = await self.eldrd.get("/metrics")
        zero = ("eldrd_in_flight{", "eldrd_handoffs_open ", "eldrd_requests_running ")
        usable = 0
        for line in text.splitlines():
            if line.startswith(zero) and float(line.rsplit(" ", 1)[1]) != 0:
                return False
            if line.startswith("eldrd_worker_usable{"):
                usable += int(float(line.rsplit(" ", 1)[1]))
        return usable == len(self.prefill) + len(self.decode)

    async def clean(self) -> None:
        """Faults off, workers up, configuration as at the start, nothing under way, the engines' counts at zero."""
        for worker in (*self.prefill, *self.decode):
            worker.faults = Faults()
            worker.seen.clear()
            if not worker.running:
                await worker.start()
        if self.eldrd.sections != self.base:
            self.eldrd.sections = {name: dict(keys) for name, keys in self.base.items()}
            await self.reload()
        await self.eldrd.until(self.settled)
        await until(lambda: self.fleet.pinned == 0)
        self.fleet.violations.clear()
        for worker in (*self.prefill, *self.decode):
            worker.engine.ledger.ends.clear()
            worker.engine.ledger.idle_releases = 0
            worker.engine.finished.clear()
            worker.engine.local_prefills = 0
            worker.received = 0


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until something in this process is so; the time says only when to give up."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)
