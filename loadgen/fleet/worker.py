"""One emulated vLLM server: HTTP routes, request life, metrics and faults over the engine. No router, no workload."""

from __future__ import annotations

import asyncio
import itertools
import uuid
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec
import orjson
from aiohttp import web

from loadgen.fleet import wire
from loadgen.fleet.engine import Engine, WorkerSpec
from loadgen.fleet.faults import Faults
from loadgen.fleet.kv import block_hashes
from loadgen.fleet.metrics import exposition
from loadgen.fleet.protocol import ApiError, Call, hand_off_of, parse
from loadgen.fleet.render import DONE, Answer, error_event
from loadgen.fleet.sequence import Output, Sequence, outputs
from loadgen.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp.typedefs import Handler

    from loadgen.fleet.handoff import Fabric
    from loadgen.fleet.model import EmulatedMoE

VERSION = "0.32.0"
_MAX_BODY = 64 * 2**20
_GZIP = 31


@dataclass(slots=True)
class Sent:
    """What a worker answered to one request with status 200, before faults of the wire and compression. whole: it had
    nothing more to say."""

    body: bytearray = field(default_factory=bytearray)
    whole: bool = False


class Worker:
    """A server on its own port. ``start`` and ``stop`` may alternate: a restarted worker keeps its port and has a new
    engine, as a restarted vLLM has. ``faults`` may be changed at any time; ``draw``, where set, gives each generation
    request its own. api_key: what /v1 paths want as a bearer token, "" for nothing, as vLLM's --api-key.
    received: generation requests so far. Where the spec asks for it, journal: answers by X-Request-Id, and seen: the
    latest requests' headers and bodies."""

    def __init__(self, spec: WorkerSpec, model: EmulatedMoE, fabric: Fabric) -> None:
        self.spec, self.model, self.faults = spec, model, Faults()
        self.draw: Callable[[], Faults] | None = None
        self.journal: dict[str, Sent] = {}
        self.seen: deque[tuple[Mapping[str, str], bytes]] = deque(maxlen=16)
        self.received = 0
        self.api_key = ""
        self.port = spec.port or free_port()
        self._fabric = fabric
        self._engine: Engine | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._wires: set[wire.Wire] = set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return (
            f"http://[{self.spec.host}]:{self.port}"
            if ":" in self.spec.host
            else f"http://{self.spec.host}:{self.port}"
        )

    @property
    def running(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The running engine. Raises RuntimeError while the worker is stopped."""
        if self._engine is None:
            raise RuntimeError(f"worker {self.name} is not running")
        return self._engine

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._keyed])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/emulated/stats", self._stats),
                web.post("/emulated/faults", self._set_faults),
            ]
        )
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.1,
            keepalive_timeout=self.spec.keepalive_s,
        )
        await self._runner.setup()
        await self.listen()
        self._engine = Engine(self.spec, self.model, self._fabric, self.port + 1)

    async def listen(self) -> None:
        """Accept connections (again)."""
        assert self._runner is not None
        assert self._runner.server is not None
        server = self._runner.server
        self._listener = await wire.serve(
            lambda: cast("asyncio.Protocol", server()), self._wires, self.spec.host, self.port
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    def unlisten(self) -> None:
        """Refuse new connections; those that exist go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def stop(self) -> None:
        """Break all connections and lose the engine, as a killed server does."""
        self.unlisten()
        for connection in list(self._wires):
            connection.abort()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._engine is not None:
            await self._engine.stop()
            self._engine = None

    @web.middleware
    async def _keyed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.api_key and request.path.startswith("/v1") and given != f"Bearer {self.api_key}":
            return _json({"error": "Unauthorized"}, 401)
        return await handler(request)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        faults = self.draw() if self.draw is not None else self.faults
        self.received += 1
        connection = cast("wire.Wire", request.transport)
        connection.arm(faults)
        engine = self.engine
        body = b""
        try:
            if faults.drop_reused and connection.requests > 1:
                _end(connection, faults)
            body = await request.read()
            if self.spec.journal:
                self.seen.append((request.headers, body))
            if faults.delay_s:
                await asyncio.sleep(faults.delay_s)
            if faults.status is not None:
                raise ApiError(faults.status, "Emulated fault", "InternalServerError")
            call = parse(body, chat=chat, model=self.model)
        except ApiError as e:
            if e.status < 500:
                engine.reject(hand_off_of(body))
            return _json(e.body, e.status)
        except asyncio.CancelledError:
            engine.reject(hand_off_of(body))
            raise
        if faults.refuse:
            _end(connection, faults)
        id_ = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{id_}"
        changed = asyncio.Event()
        sequences = self._sequences(call, answer_id, changed, faults)
        texts = [self.model.vocabulary.decode(p.tolist()) for p in call.prompts] if call.echo else []
        answer = Answer(call, answer_id, self.model.spec.name, sequences, texts)
        for seq in sequences:
            engine.submit(seq)
        sent = Sent()
        if self.spec.journal:
            self.journal[id_] = sent
        try:
            if call.stream:
                return await _Stream(request, call, answer, sequences, changed, faults, sent).run()
            return await self._whole(answer, sequences, changed, faults, sent)
        except ConnectionError:
            # The client is gone, and aiohttp has not said so yet.
            raise asyncio.CancelledError from None
        finally:
            for seq in sequences:
                engine.abort(seq)

    def _sequences(self, call: Call, answer_id: str, changed: asyncio.Event, faults: Faults) -> list[Sequence]:
        size = self.model.spec.block_size
        sequences = []
        planned = iter(outputs(call, self.model))
        for p, prompt in enumerate(call.prompts):
            hashes = block_hashes(prompt, size, call.cache_salt)
            for _ in range(call.n):
                output = _spoiled(next(planned), faults)
                inner = f"-{p}" if not call.chat else ""
                rid = f"{answer_id}{inner}-{uuid.uuid4().hex[:8]}"
                sequences.append(Sequence(rid, prompt, hashes, output, changed, call.kv_transfer_params))
        return sequences

    async def _whole(
        self, answer: Answer, sequences: list[Sequence], changed: asyncio.Event, faults: Faults, sent: Sent
    ) -> web.Response:
        while not all(s.done for s in sequences):
            changed.clear()
            await changed.wait()
        if error := next((s.error for s in sequences if s.error), None):
            return _json(ApiError(500, error, "InternalServerError").body, 500)
        seq = sequences[0]
        if seq.hand_off is not None and faults.drop_params:
            seq.hand_off = None
        elif seq.hand_off is not None and faults.wrong_params:
            seq.hand_off = {**seq.hand_off, "remote_request_id": f"{seq.request_id}-wrong"}
        body = answer.whole()
        sent.body += body
        sent.whole = True
        if faults.gzip:
            packed = zlib.compress(body, wbits=_GZIP)
            return web.Response(body=packed, content_type="application/json", headers={"Content-Encoding": "gzip"})
        return web.Response(body=body, content_type="application/json")

    async def _models(self, _: web.Request) -> web.Response:
        spec = self.model.spec
        card = {
            "id": spec.name,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": spec.name,
            "parent": None,
            "max_model_len": spec.max_model_len,
            "permission": [],
        }
        return _json({"object": "list", "data": [card]}, 200)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.faults.health_status)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION}, 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        engine = self.engine
        body = exposition(
            self.model.spec.name,
            running=engine.prefill.running + engine.decode.running,
            waiting=engine.prefill.waiting + engine.decode.waiting,
            kv_usage=engine.pool.usage,
            prefix_queries=engine.prefill.queries,
            prefix_hits=engine.prefill.hits,
            finished=engine.finished,
            expired=engine.ledger.ends["expired"],
        )
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.engine.pool.reset()
        return web.Response()

    async def _stats(self, request: web.Request) -> web.Response:
        """What a run needs to judge the fleet: decode steps from number ``?since=N`` on as [batch, active experts] and
        the number of the next one, hand-offs, rule violations, hook counters."""
        engine = self.engine
        steps = engine.decode.steps
        since = int(request.query.get("since", 0))
        hook = engine.hook
        return _json(
            {
                "next_step": len(steps),
                "steps": [[s.batch, s.active] for s in itertools.islice(steps, since, None)],
                "local_prefills": engine.local_prefills,
                "hand_offs": {"pinned": engine.ledger.pinned, **engine.ledger.ends},
                "violations": [v.kind for v in self._fabric.violations if v.worker == self.name],
                "hook": {"sent": hook.sent, "dropped": hook.dropped, "lost_rows": hook.lost_rows} if hook else None,
            },
            200,
        )

    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            self.faults = msgspec.json.decode(await request.read(), type=Faults)
        except msgspec.DecodeError as e:
            return _json({"error": str(e)}, 400)
        return web.Response()


class _Stream:
    """One streamed answer."""

    def __init__(
        self,
        request: web.Request,
        call: Call,
        answer: Answer,
        sequences: list[Sequence],
        changed: asyncio.Event,
        faults: Faults,
        sent: Sent,
    ) -> None:
        self._request, self._call, self._answer = request, call, answer
        self._sequences, self._changed, self._faults, self._sent = sequences, changed, faults, sent
        self._packer = zlib.compressobj(wbits=_GZIP) if faults.gzip else None
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if faults.gzip:
            self._response.headers["Content-Encoding"] = "gzip"
        self._response.enable_chunked_encoding()

    async def run(self) -> web.StreamResponse:
        await self._response.prepare(self._request)
        produced = [0] * len(self._sequences)
        events = 0
        while True:
            self._changed.clear()
            out: list[bytes] = []
            for i, seq in enumerate(self._sequences):
                if seq.produced > produced[i]:
                    if events == 0 and not out:
                        out.append(self._answer.start())
                    out += self._answer.chunks(i, produced[i], seq.produced)
                    events += seq.produced - produced[i]
                    produced[i] = seq.produced
            if out:
                await self._write(b"".join(out))
            limit = self._faults.die_after_chunks
            if limit is not None and events >= limit:
                self._die()
            if all(s.done for s in self._sequences):
                break
            if not self._changed.is_set():
                await self._changed.wait()
        if error := next((s.error for s in self._sequences if s.error), None):
            end = error_event(ApiError(500, error, "InternalServerError").body)
        else:
            end = self._answer.usage_event() if self._call.include_usage else b""
        await self._write(end + DONE, last=True)
        self._sent.whole = True
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        self._sent.body += data
        if self._packer is not None:
            data = self._packer.compress(data) + self._packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
        size = self._faults.chunk or len(data)
        for i in range(0, len(data), size):
            await self._response.write(data[i : i + size])

    def _die(self) -> None:
        connection = cast("wire.Wire", self._request.transport)
        if self._faults.die_inside:
            # A chunk that announces more than it brings.
            begun = b'data: {"id"'
            self._sent.body += begun
            connection.write(b"40\r\n" + begun)
        _end(connection, self._faults)


def _spoiled(output: Output, faults: Faults) -> Output:
    if faults.finish_first:
        return Output(output.tokens[:1], output.pieces[:1], "stop", None)
    if faults.first_text is not None:
        return Output(output.tokens, [faults.first_text, *output.pieces[1:]], output.finish_reason, output.stop_reason)
    return output


def _json(body: dict[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _end(connection: wire.Wire, faults: Faults) -> None:
    """End the connection under a handler, which ends with it."""
    connection.cut(faults.cut)
    raise asyncio.CancelledError
