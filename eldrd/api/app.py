"""The HTTP side: which path does what, and how each request ends in metrics and one log line. Routes nothing itself."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from aiohttp import web
from multidict import CIMultiDict

from eldrd.api import auth, cors, errors, openai
from eldrd.api.relay import ClientPort, Relayed, RelayServer
from eldrd.handoff.answer import Answer
from eldrd.handoff.failure import Failure
from eldrd.handoff.request import Record, Request
from eldrd.telemetry import metrics as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp.http_parser import RawRequestMessage
    from aiohttp.streams import StreamReader

    from eldrd.api.admin import Admin
    from eldrd.handoff.admission import Admission
    from eldrd.handoff.lifecycle import Lifecycle
    from eldrd.handoff.snapshot import Snapshot

log = structlog.get_logger()

_READS = ("/v1/models", "/health", "/ready", "/metrics", "/admin/status", "/admin/handoffs")


class App:
    """Answers every request of the listener. ``current`` gives the Snapshot that a new request is served with."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        admission: Admission,
        admin: Admin,
        metrics: m.Metrics,
        current: Callable[[], Snapshot],
    ) -> None:
        self._lifecycle = lifecycle
        self._admission = admission
        self._admin = admin
        self._metrics = metrics
        self._current = current
        self.running = 0

    def server(self) -> RelayServer:
        """aiohttp's low-level server around this app, for ``loop.create_server``."""
        server = self._current().settings.server
        return RelayServer(
            self._handle,
            request_factory=self._request,
            handler_cancellation=True,
            # vLLM takes no compressed bodies either, and a small one could unfold into a large one.
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=server.keepalive_s,
            malformed=self._metrics.requests.labels("", 400, "malformed").inc,
        )

    def _request(
        self, message: RawRequestMessage, payload: StreamReader, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        limit = self._current().settings.server.max_body_bytes
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        path = http.rel_url.raw_path
        snapshot = self._current()
        allowed = cors.headers(http.headers, snapshot.settings.cors.origins)
        if http.method == "OPTIONS" and allowed:
            return _response(Answer(204, b"", [*allowed, *cors.PREFLIGHT]), None)
        try:
            auth.check(path, http.headers, snapshot.client_keys)
        except Failure as failure:
            self._metrics.requests.labels("", failure.status, failure.outcome).inc()
            return _response(errors.error_answer(failure), None, allowed)
        if path in openai.PATHS:
            if http.method != "POST":
                return _response(errors.error_answer(errors.wrong_method("POST")), None, allowed)
            return await self._generate(http, path, snapshot, allowed)
        if path in _READS:
            if http.method not in ("GET", "HEAD"):
                return _response(errors.error_answer(errors.wrong_method("GET")), None, allowed)
            return _response(self._read(path), None, allowed)
        return _response(errors.error_answer(errors.unknown_path()), None, allowed)

    def _read(self, path: str) -> Answer:
        if path == "/metrics":
            return Answer(200, self._metrics.exposition(), [(b"content-type", m.CONTENT_TYPE.encode())])
        if path == "/health":
            return Answer(200, b"", [])
        if path == "/ready":
            problem = self._admin.not_ready()
            if problem is None:
                return Answer(200, b"", [])
            failure = Failure(503, "ServiceUnavailableError", problem, outcome="not_ready", retry_after_s=1)
            return errors.error_answer(failure)
        read = {
            "/v1/models": self._admin.models,
            "/admin/status": self._admin.status,
            "/admin/handoffs": self._admin.handoffs,
        }[path]
        return Answer(200, orjson.dumps(read()), [errors.JSON_TYPE])

    async def _generate(
        self, http: web.BaseRequest, path: str, snapshot: Snapshot, allowed: list[tuple[bytes, bytes]]
    ) -> web.StreamResponse:
        """One completion, from its body to its end; metrics and the log line are written here whatever happens."""
        record = Record(arrived=monotonic())
        request: Request | None = None
        port: ClientPort | None = None
        self.running += 1
        try:
            try:
                body = await _body(http, snapshot.settings.server.max_body_bytes)
                request = openai.parse(path, body, http.headers, self._admin.model_names(), self._admin.aliases())
                port = ClientPort(http, request.client_id, stream=request.stream, headers=allowed)
                await self._admission.enter()
                try:
                    answer = await self._lifecycle.serve(request, snapshot, port, record)
                finally:
                    self._admission.leave()
            except Failure as failure:
                record.outcome = failure.outcome
                answer = errors.error_answer(failure)
            except (asyncio.CancelledError, ConnectionError):
                record.outcome = "client_gone"
                record.status = 499
                raise
            except Exception as e:
                log.error("request_failed", id=request and request.id, exception=type(e).__name__, exc_at=_where(e))
                record.outcome = "internal"
                answer = errors.error_answer(errors.internal())
            record.status = answer.status
            if not record.outcome:
                record.outcome = "ok" if answer.status < 400 else f"worker_{answer.status // 100}xx"
            if answer.relayed and port is not None:
                return Relayed(answer.status, keep_alive=answer.complete and port.keep_alive)
            return _response(answer, request.client_id if request is not None else None, allowed)
        finally:
            self.running -= 1
            self._ended(path, request, snapshot, record)

    def _ended(self, path: str, request: Request | None, snapshot: Snapshot, record: Record) -> None:
        now = record.ended or monotonic()
        metrics = self._metrics
        metrics.requests.labels(path, record.status, record.outcome).inc()
        if request is None:
            if snapshot.settings.log.requests:
                log.info("request", path=path, status=record.status, outcome=record.outcome)
            return
        metrics.signatures.labels(record.signature).inc()
        tpot = 0.0
        if record.first:
            metrics.ttft.observe(record.first - record.arrived)
            # Parts run side by side: their tokens over one time say nothing.
            if request.stream and record.output_tokens > 1 and record.parts == 1 and record.decode:
                tpot = (now - record.first) / (record.output_tokens - 1)
                metrics.tpot.labels(record.decode).observe(tpot)
        metrics.output_tokens.inc(record.output_tokens)
        if snapshot.settings.log.requests:
            log.info(
                "request",
                id=request.id,
                client_id=request.client_id,
                path=path,
                stream=request.stream,
                status=record.status,
                outcome=record.outcome,
                prefill=record.prefill,
                prefill_reason=record.prefill_reason,
                decode=record.decode,
                policy=snapshot.decode_policy.name,
                decode_reason=record.decode_reason,
                score=round(record.score, 4),
                candidates=record.candidates,
                signature=record.signature,
                prompt_tokens=record.prompt_tokens,
                cached_tokens=record.cached_tokens,
                output_tokens=record.output_tokens,
                parts=record.parts,
                retries=record.retries,
                prefill_ms=_ms(record.arrived, record.prefilled),
                decide_ms=_ms(record.prefilled, record.decided),
                ttft_ms=_ms(record.arrived, record.first),
                tpot_ms=round(tpot * 1e3, 3),
                total_ms=_ms(record.arrived, now),
                generation=snapshot.generation,
            )


def _ms(start: float, end: float) -> float | None:
    return round((end - start) * 1e3, 3) if start and end else None


def _where(e: BaseException) -> str:
    tb = e.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}" if tb is not None else "?"


async def _body(http: web.BaseRequest, limit: int) -> bytes:
    try:
        if http.headers.get("Expect", "").lower() == "100-continue":
            assert http.transport is not None
            http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await http.read()
    except web.HTTPRequestEntityTooLarge:
        raise errors.too_large(limit) from None
    except web.RequestPayloadError:
        raise errors.bad_request("The body's transfer coding is broken.") from None


def _response(answer: Answer, client_id: str | None, more: Sequence[tuple[bytes, bytes]] = ()) -> web.Response:
    headers = CIMultiDict((k.decode("latin-1"), v.decode("latin-1")) for k, v in (*answer.headers, *more))
    if client_id is not None:
        headers["X-Request-Id"] = client_id
    return web.Response(status=answer.status, body=answer.body, headers=headers)
