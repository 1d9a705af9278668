"""One emulated vLLM server: HTTP routes, request life and metrics over the engine parts. No router, no workload.

Roles: ``prefill`` (has the hook), ``decode``, ``plain``. As with real vLLM the role only decides what is attached; any
worker prefills a request that brings no KV and decodes as far as it is asked. One simplification: prefill and decode of
one worker do not slow each other down, which matters to plain workers only.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
from aiohttp import web

from loadgen.fleet.decode import DecodeLoop, StepCost
from loadgen.fleet.faults import Faults
from loadgen.fleet.handoff import Fabric, HandoffError, Ledger
from loadgen.fleet.hook import EmulatedHook
from loadgen.fleet.kv import BlockPool, block_hashes
from loadgen.fleet.metrics import exposition
from loadgen.fleet.prefill import PrefillCost, PrefillQueue
from loadgen.fleet.protocol import ApiError, Call, parse
from loadgen.fleet.render import DONE, Answer, error_event
from loadgen.fleet.sequence import Sequence, plan_output

if TYPE_CHECKING:
    from loadgen.fleet.model import EmulatedMoE

VERSION = "0.32.0"
_MAX_BODY = 64 * 2**20


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """name; role; hook: ZMQ endpoint of eldrd for a prefill worker, None = no hook; port 0 = any free one;
    transfer_s: time D needs to fetch a hand-off; lease_s: how long P keeps one; kv_blocks: size of the KV cache."""

    name: str
    role: str = "plain"
    host: str = "127.0.0.1"
    port: int = 0
    hook: str | None = None
    kv_blocks: int = 8192
    max_num_seqs: int = 256
    lease_s: float = 30.0
    transfer_s: float = 0.003
    prefill: PrefillCost = field(default_factory=PrefillCost)
    decode: StepCost = field(default_factory=StepCost)


class _Engine:
    """Everything that dies with the process: KV, queues, hand-offs, hook."""

    def __init__(self, spec: WorkerSpec, model: EmulatedMoE, fabric: Fabric, side_port: int) -> None:
        self.pool = BlockPool(spec.kv_blocks)
        self.ledger = Ledger(spec.host, side_port, spec.lease_s)
        self.hook = EmulatedHook(model, spec.name, spec.hook) if spec.hook else None
        self.finished: Counter[str] = Counter()
        self.local_prefills = 0
        self._spec, self._fabric = spec, fabric
        self.prefill = PrefillQueue(self.pool, model.spec.block_size, spec.prefill, self.hook, self._prefilled)
        self.decode = DecodeLoop(model, self.pool, spec.decode, spec.max_num_seqs, self._finish)
        fabric.join(self.ledger)
        self._tasks = [asyncio.create_task(self.prefill.run()), asyncio.create_task(self.decode.run())]
        if self.hook is not None:
            self._tasks.append(asyncio.create_task(self.hook.run()))

    def submit(self, seq: Sequence) -> None:
        if not (seq.params or {}).get("do_remote_prefill"):
            self.local_prefills += 1
            self.prefill.add(seq)
            return
        try:
            self._fabric.claim(self._spec.name, seq)
        except HandoffError:
            self.finished["error"] += 1
            seq.fail("Internal server error")
            return
        asyncio.get_running_loop().call_later(self._spec.transfer_s, self._arrived, seq)

    def abort(self, seq: Sequence) -> None:
        """The client is gone."""
        if seq.done or seq.aborted:
            return
        seq.aborted = True
        self.finished["abort"] += 1
        self.prefill.discard(seq)
        self.decode.discard(seq)
        self._release(seq)

    async def stop(self) -> None:
        self._fabric.leave(self.ledger)
        self.ledger.close()
        for t in self._tasks:
            t.cancel()
        for t in self._tasks:
            with suppress(asyncio.CancelledError):
                await t

    def _arrived(self, seq: Sequence) -> None:
        if not seq.aborted:
            self.decode.add(seq)

    def _prefilled(self, seq: Sequence) -> None:
        if seq.aborted:
            self._release(seq)
        elif seq.done:
            self._finish(seq)
        else:
            self.decode.add(seq)

    def _finish(self, seq: Sequence) -> None:
        self.finished[seq.output.finish_reason] += 1
        params = seq.params or {}
        if params.get("do_remote_decode"):
            seq.hand_off = self.ledger.pin(seq, lambda: self._release(seq))
            if self.hook is not None and "eldr_id" in params:
                seq.hand_off["eldr"] = {"id": params["eldr_id"], "blocks": len(seq.hashes)}
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        if seq is self.prefill.current:
            return  # still being computed; its end releases it
        self.pool.release(seq.blocks)
        seq.blocks = []
        self.prefill.room()
        self.decode.room()


class Worker:
    """A server on its own port. ``start`` and ``stop`` may alternate: a restarted worker keeps its port and has a new
    engine, as a restarted vLLM has. ``faults`` may be changed at any time."""

    def __init__(self, spec: WorkerSpec, model: EmulatedMoE, fabric: Fabric) -> None:
        self.spec, self.model, self.faults = spec, model, Faults()
        self.port = spec.port
        self._fabric = fabric
        self._engine: _Engine | None = None
        self._runner: web.AppRunner | None = None
        self._retired_finishes: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return f"http://{self.spec.host}:{self.port}"

    @property
    def engine(self) -> _Engine:
        """The running engine. Raises RuntimeError while the worker is stopped."""
        if self._engine is None:
            raise RuntimeError(f"worker {self.name} is not running")
        return self._engine

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY)
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
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.spec.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._engine = _Engine(self.spec, self.model, self._fabric, self.port + 1)

    async def stop(self) -> None:
        """Break all connections and lose the engine, as a killed server does."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._engine is not None:
            await self._engine.stop()
            self._engine = None

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        faults = self.faults
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        if faults.refuse:
            _cut(request)
        try:
            if faults.status is not None:
                raise ApiError(faults.status, "Emulated fault", "InternalServerError")
            call = parse(await request.read(), chat=chat, model=self.model)
        except ApiError as e:
            return _json(e.body, e.status)
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"
        changed = asyncio.Event()
        sequences = self._sequences(call, answer_id, changed)
        texts = [self.model.vocabulary.decode(p.tolist()) for p in call.prompts] if call.echo else []
        answer = Answer(call, answer_id, self.model.spec.name, sequences, texts)
        engine = self.engine
        for seq in sequences:
            engine.submit(seq)
        try:
            if call.stream:
                return await self._stream(request, call, answer, sequences, changed)
            return await self._whole(answer, sequences, changed)
        finally:
            for seq in sequences:
                engine.abort(seq)

    def _sequences(self, call: Call, answer_id: str, changed: asyncio.Event) -> list[Sequence]:
        size = self.model.spec.block_size
        sequences = []
        for p, (prompt, limit) in enumerate(zip(call.prompts, call.max_tokens, strict=True)):
            hashes = block_hashes(prompt, size, call.cache_salt)
            for i in range(call.n):
                tokens = self.model.continue_prompt(prompt, limit, call.min_tokens, call.ignore_eos, call.seed + i)
                output = plan_output(
                    tokens,
                    self.model.vocabulary,
                    max_tokens=limit,
                    stop=call.stop,
                    stop_token_ids=call.stop_token_ids,
                    include_stop=call.include_stop,
                )
                inner = f"-{p}" if not call.chat else ""
                rid = f"{answer_id}{inner}-{uuid.uuid4().hex[:8]}"
                sequences.append(Sequence(rid, prompt, hashes, output, changed, call.kv_transfer_params))
        return sequences

    async def _whole(self, answer: Answer, sequences: list[Sequence], changed: asyncio.Event) -> web.Response:
        while not all(s.done for s in sequences):
            changed.clear()
            await changed.wait()
        if error := next((s.error for s in sequences if s.error), None):
            return _json(ApiError(500, error, "InternalServerError").body, 500)
        self._spoil(sequences[0])
        return web.Response(body=answer.whole(), content_type="application/json")

    async def _stream(
        self, request: web.Request, call: Call, answer: Answer, sequences: list[Sequence], changed: asyncio.Event
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        sent = [0] * len(sequences)
        events = 0
        while True:
            changed.clear()
            out: list[bytes] = []
            for i, seq in enumerate(sequences):
                if seq.produced > sent[i]:
                    if events == 0 and not out:
                        out.append(answer.start())
                    out += answer.chunks(i, sent[i], seq.produced)
                    events += seq.produced - sent[i]
                    sent[i] = seq.produced
            if out:
                await response.write(b"".join(out))
            limit = self.faults.die_after_chunks
            if limit is not None and events >= limit:
                _cut(request)
            if all(s.done for s in sequences):
                break
            if not changed.is_set():
                await changed.wait()
        if error := next((s.error for s in sequences if s.error), None):
            end = error_event(ApiError(500, error, "InternalServerError").body)
        else:
            end = answer.usage_event() if call.include_usage else b""
        await response.write(end + DONE)
        await response.write_eof()
        return response

    def _spoil(self, seq: Sequence) -> None:
        if seq.hand_off is not None and self.faults.drop_params:
            seq.hand_off = None
        elif seq.hand_off is not None and self.faults.wrong_params:
            seq.hand_off = {**seq.hand_off, "remote_request_id": f"{seq.request_id}-wrong"}

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


def _json(body: dict[str, Any], status: int) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _cut(request: web.Request) -> None:
    """Break the connection under a handler, which is cancelled by that."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
