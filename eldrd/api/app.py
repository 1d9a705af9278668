"""The HTTP side: which path does what, and how each request ends in metrics and one log line. Routes nothing itself."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from eldrd.api import auth, cors, errors, openai
from eldrd.api.server import HttpServer
from eldrd.handoff.answer import Answer
from eldrd.handoff.failure import Failure
from eldrd.handoff.request import Record, Request
from eldrd.telemetry import logs
from eldrd.telemetry import metrics as m

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from eldrd.api.admin import Admin
    from eldrd.api.exchange import Exchange
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
        # Of these, the requests that had not ended when the drain was over, and are ended now.
        self.unfinished = 0

    def server(self) -> HttpServer:
        """The server around this app, for ``loop.create_server``."""
        return HttpServer(self, self._current().settings.server.keepalive_s)

    def limit(self) -> int:
        """The largest body, as the settings of the moment say."""
        return self._current().settings.server.max_body_bytes

    def malformed(self) -> None:
        """A line of log for each would let anyone fill the disk."""
        self._metrics.requests.labels("", 400, "malformed").inc()

    def abandoned(self, exchange: Exchange) -> None:
        """An upload that broke off ends like a request whose client has gone."""
        if exchange.path in openai.PATHS and exchange.failure is None:
            record = Record(arrived=monotonic(), status=499, outcome="client_gone")
            self._ended(exchange.path, None, self._current(), record)

    def begin(self, exchange: Exchange) -> None:
        """Who may, and where to: known before the body."""
        settings = self._current()
        exchange.extra = cors.headers(exchange.headers, settings.settings.cors.origins)
        if exchange.method == "OPTIONS" and exchange.extra:
            return
        path = exchange.path
        try:
            auth.check(path, exchange.headers, settings.client_keys)
        except Failure as failure:
            self._metrics.requests.labels("", failure.status, failure.outcome).inc()
            exchange.failure = failure
            return
        if path in openai.PATHS:
            if exchange.method != "POST":
                exchange.failure = errors.wrong_method("POST")
        elif path not in _READS:
            exchange.failure = errors.unknown_path()
        elif exchange.method not in ("GET", "HEAD"):
            exchange.failure = errors.wrong_method("GET")

    def handle(self, exchange: Exchange) -> Coroutine[Any, Any, bool] | None:
        """Answer, or return what generates."""
        failure = exchange.failure
        if exchange.method == "OPTIONS" and exchange.extra:
            exchange.respond(Answer(204, b"", list(cors.PREFLIGHT)))
        elif failure is None and exchange.path in _READS:
            exchange.respond(self._read(exchange.path))
        elif failure is None or failure.outcome == "too_large":
            return self._generate(exchange)
        else:
            exchange.respond(errors.error_answer(failure))
        return None

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

    async def _generate(self, exchange: Exchange) -> bool:
        """One completion, from its body to its end, and whether the connection can be kept; metrics and the log line are
        written here whatever happens."""
        record = Record(arrived=monotonic())
        path = exchange.path
        snapshot = self._current()
        request: Request | None = None
        self.running += 1
        try:
            try:
                if exchange.failure is not None:
                    raise exchange.failure
                admission = self._admission
                models, aliases = self._admin.names()
                request = openai.parse(path, exchange.body, exchange.headers, models, aliases)
                exchange.body = b""
                exchange.client_id = request.client_id
                exchange.stream = request.stream
                if not admission.try_enter():
                    await admission.enter()
                try:
                    answer = await self._lifecycle.serve(request, snapshot, exchange, record)
                finally:
                    admission.leave()
            except Failure as failure:
                record.outcome = failure.outcome
                answer = errors.error_answer(failure)
            except (asyncio.CancelledError, ConnectionError):
                record.outcome, record.status = ("drain_over", 503) if self.unfinished else ("client_gone", 499)
                raise
            except Exception as e:
                log.error("request_failed", id=request and request.id, exception=type(e).__name__, exc_at=_where(e))
                record.outcome = "internal"
                answer = errors.error_answer(errors.internal())
            record.status = answer.status
            if not record.outcome:
                record.outcome = "ok" if answer.status < 400 else f"worker_{answer.status // 100}xx"
            if not answer.relayed:
                try:
                    exchange.respond(answer)
                except ConnectionResetError:
                    record.outcome, record.status = "client_gone", 499
                    raise
            return answer.complete and exchange.keep_alive
        finally:
            self.running -= 1
            self._ended(path, request, snapshot, record)

    def _ended(self, path: str, request: Request | None, snapshot: Snapshot, record: Record) -> None:
        metrics = self._metrics
        metrics.requests.labels(path, record.status, record.outcome).inc()
        logged = snapshot.settings.log.requests
        if request is None:
            if logged:
                log.info("request", path=path, status=record.status, outcome=record.outcome)
            return
        now = record.ended or monotonic()
        metrics.signatures.labels(record.signature).inc()
        tpot = 0.0
        if record.first:
            metrics.ttft.observe(record.first - record.arrived)
            # Parts run side by side: their tokens over one time say nothing.
            if request.stream and record.output_tokens > 1 and record.parts == 1 and record.decode:
                tpot = (now - record.first) / (record.output_tokens - 1)
                metrics.tpot.labels(record.decode).observe(tpot)
        metrics.output_tokens.inc(record.output_tokens)
        if logged:
            policy, generation = snapshot.decode_policy.name, snapshot.generation
            logs.info(
                "request",
                _line,
                request.id,
                request.client_id,
                path,
                request.stream,
                record,
                now,
                tpot,
                policy,
                generation,
            )


def _line(
    id_: str,
    client_id: str,
    path: str,
    stream: bool,
    record: Record,
    now: float,
    tpot: float,
    policy: str,
    generation: int,
) -> dict[str, Any]:
    """What the log says of a request."""
    return {
        "id": id_,
        "client_id": client_id,
        "path": path,
        "stream": stream,
        "status": record.status,
        "outcome": record.outcome,
        "prefill": record.prefill,
        "prefill_reason": record.prefill_reason,
        "decode": record.decode,
        "policy": policy,
        "decode_reason": record.decode_reason,
        "score": round(record.score * 1e4) / 1e4,
        "candidates": record.candidates,
        "signature": record.signature,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "parts": record.parts,
        "retries": record.retries,
        "prefill_ms": _ms(record.arrived, record.prefilled),
        "decide_ms": _ms(record.prefilled, record.decided),
        "ttft_ms": _ms(record.arrived, record.first),
        "tpot_ms": round(tpot * 1e6) / 1e3,
        "total_ms": _ms(record.arrived, now),
        "generation": generation,
    }


def _ms(start: float, end: float) -> float | None:
    # Twice as fast as rounding to three places.
    return round((end - start) * 1e6) / 1e3 if start and end else None


def _where(e: BaseException) -> str:
    tb = e.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}" if tb is not None else "?"
