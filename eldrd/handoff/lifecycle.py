"""One request's way from prefill to decode, from its lease on P to the end of D's answer. Parses no client HTTP.

Every way out of here ends the leases and the hand-off; what cannot be answered leaves as Failure.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import orjson

from eldrd.fleet import vllm
from eldrd.fleet.connection import UpstreamError
from eldrd.fleet.events import between_events
from eldrd.handoff import fanout
from eldrd.handoff.answer import Answer
from eldrd.handoff.failure import bad_gateway, no_worker
from eldrd.handoff.release import Releaser
from eldrd.handoff.retry import Retries, final
from eldrd.routing.policy import NoWorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from eldrd.fleet.connection import Connection
    from eldrd.fleet.framing import Head
    from eldrd.fleet.pool import IdleWatch
    from eldrd.fleet.table import LoadTable
    from eldrd.fleet.worker import Worker
    from eldrd.handoff.answer import Client
    from eldrd.handoff.ledger import HandOff, Ledger
    from eldrd.handoff.request import Record, Request
    from eldrd.handoff.snapshot import Snapshot
    from eldrd.routing.policy import Decision
    from eldrd.signatures.receiver import Signature, SignatureReceiver
    from eldrd.telemetry.metrics import Metrics


# A shorter answer's mean gap says more of its first events than of the worker's steps.
_TPOT_TOKENS: Final = 16
_RELAYED: Final = Answer(200, b"", [], relayed=True)
_TAIL: Final = 4096  # where the usage is in a collected answer


class _PrefillAgainError(Exception):
    """The hand-off cannot be used (any more): the prompt must be prefilled once more."""


class Lifecycle:
    """Serves requests over the workers of a Snapshot."""

    def __init__(
        self,
        table: LoadTable,
        ledger: Ledger,
        receiver: SignatureReceiver,
        watch: IdleWatch,
        metrics: Metrics,
        captured: Callable[[Signature, int, str | None], None],
        observed: Callable[[Signature], None] | None = None,
        current: Callable[[], Snapshot] | None = None,
    ) -> None:
        """captured: given each whole signature with its output length and label when a capture is on;
        observed: given each signature before its request is decided; current: the newest Snapshot, for requests whose own
        has no usable worker left."""
        self.table = table
        self.ledger = ledger
        self.receiver = receiver
        self.watch = watch
        self.metrics = metrics
        self.captured = captured
        self.observed = observed
        self.current = current
        self.releaser = Releaser(ledger)

    async def serve(self, request: Request, snapshot: Snapshot, client: Client, record: Record) -> Answer:
        """Prefill, decide, decode, relay. Raises Failure; cancelled when the client goes away."""

        if request.single:
            return await _Way(self, request, snapshot, client, record).walk()

        async def one(request: Request, client: Client, record: Record) -> Answer:
            return await _Way(self, request, snapshot, client, record).walk()

        return await fanout.serve(request, client, record, one)


class _Way:
    """The state of one request while it is served."""

    __slots__ = (
        "attempt",
        "client",
        "life",
        "record",
        "request",
        "retries",
        "signature",
        "snap",
        "wants_signature",
    )

    def __init__(self, life: Lifecycle, request: Request, snap: Snapshot, client: Client, record: Record) -> None:
        self.life = life
        self.request = request
        self.snap = snap
        self.client = client
        self.record = record
        self.attempt = 0
        self.retries = Retries(snap.settings, life.metrics, record)
        self.signature: Signature | None = None
        self.wants_signature = snap.decode_policy.wants_signature or bool(snap.settings.capture.dir)

    async def walk(self) -> Answer:
        while True:
            outcome = await self._prefill()
            if isinstance(outcome, Answer):
                return outcome
            try:
                if self.wants_signature:
                    receiver = self.life.receiver
                    self._signed(receiver.ready(outcome.id) or await self._wait(outcome.id))
                    receiver.forget(outcome.id)
                return await self._decode(outcome)
            except _PrefillAgainError:
                continue
            finally:
                if not outcome.given:
                    self.life.releaser.release(outcome, self.snap)
                elif not outcome.releasing:
                    outcome.end("lost")
                self.life.receiver.forget(outcome.id)

    # -- prefill --------------------------------------------------------------------------------------------------------

    async def _prefill(self) -> HandOff | Answer:
        """The prefill leg, on another worker if one fails before it answered: a hand-off, or the final answer."""
        request, life, record = self.request, self.life, self.record
        while True:
            self.attempt += 1
            eldr_id = request.id if self.attempt == 1 else f"{request.id}-{self.attempt}"
            if self.wants_signature:
                life.receiver.expect(eldr_id)
            hand_off: HandOff | None = None
            try:
                worker = self._prefill_worker()
                head, body = await self._prefill_once(worker, eldr_id)
                if head.status != 200:
                    return Answer(head.status, body, head.end_to_end)
                answer = self._parsed(body)
                params = vllm.transfer_params(answer)
                if request.single_token or vllm.finished(answer):
                    if params is not None:
                        unused = life.ledger.open(eldr_id, worker.name, params, monotonic())
                        life.releaser.release(unused, self.snap)
                    return self._early(answer, head.end_to_end)
                if params is None:
                    raise bad_gateway("prefill", "no_transfer_params")
                hand_off = life.ledger.open(eldr_id, worker.name, params, record.prefilled)
                return hand_off
            except UpstreamError as e:
                self.retries.again("prefill", e)
            finally:
                if hand_off is None:
                    life.receiver.forget(eldr_id)

    def _prefill_worker(self) -> Worker:
        while True:
            snap, record = self.snap, self.record
            usable = self.retries.usable(snap.prefill)
            try:
                decision = snap.prefill_policy.choose(self.request.prefix, snap.prefill.in_flight(), usable)
            except NoWorkerError:
                self._move_on("prefill")
                continue
            worker = snap.prefill.workers[decision.worker]
            record.prefill, record.prefill_reason = worker.name, decision.reason
            self.life.metrics.routed.labels("prefill", worker.name, decision.reason).inc()
            return worker

    async def _prefill_once(self, worker: Worker, eldr_id: str) -> tuple[Head, bytes]:
        request, snap = self.request, self.snap
        body = vllm.prefill_body(request.fields, eldr_id, hand_off=not request.single_token)
        limit_s = snap.settings.timeouts.prefill_s
        lease = self.life.table.lease(worker)
        connection: Connection | None = None
        adopted = False
        started = monotonic()
        try:
            connection = worker.pool.pop() or await worker.pool.connect()
            head = await connection.send(self._post(worker, eldr_id, [body]), limit_s)
            answer = connection.body() if connection.complete else await connection.collect(limit_s, vllm.MAX_ANSWER)
            self.retries.answered(worker, head.status)
        except UpstreamError as e:
            self.retries.failed(worker, e)
            raise
        except asyncio.CancelledError:
            if connection is not None:
                adopted = True
                self.life.releaser.adopt(connection, eldr_id, worker, lease, snap)
            raise
        finally:
            if not adopted:
                if connection is not None:
                    connection.release()
                lease.end()
        self.record.prefilled = now = monotonic()
        self.life.metrics.prefill.observe(now - started)
        return head, answer

    def _parsed(self, body: bytes) -> dict[str, Any]:
        try:
            answer = vllm.parsed(body, chat=self.request.chat)
        except ValueError:
            raise bad_gateway("prefill", "invalid_answer") from None
        if usage := answer.get("usage"):
            self.record.prompt_tokens = usage.get("prompt_tokens") or 0
            if details := usage.get("prompt_tokens_details"):
                self.record.cached_tokens = details.get("cached_tokens") or 0
        return answer

    def _early(self, answer: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> Answer:
        """P's answer as the client's, where its one token is all there is."""
        self.record.output_tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
        self.record.decode_reason = "finished_at_prefill"
        self.record.first = self.record.ended = monotonic()
        answer.pop(vllm.TRANSFER, None)
        if not self.request.stream:
            return Answer(200, orjson.dumps(answer), headers)
        events = vllm.early_stream(answer, chat=self.request.chat, include_usage=self.request.include_usage)
        return Answer(200, events, [(b"content-type", b"text/event-stream; charset=utf-8")])

    async def _wait(self, eldr_id: str) -> Signature | None:
        return await self.life.receiver.wait(eldr_id, self.snap.settings.signatures.wait_ms / 1e3)

    def _signed(self, signature: Signature | None) -> None:
        life, record = self.life, self.record
        self.signature = signature
        life.metrics.signature_wait.observe(monotonic() - record.prefilled)
        if signature is None:
            record.signature = "missing"
            return
        record.signature = signature.state
        if life.observed is not None:
            life.observed(signature)

    def _move_on(self, role: str) -> None:
        """No worker of this role is left: if a reload has brought others since, go on with them. Raises Failure."""
        newest = self.snap if self.life.current is None else self.life.current()
        if newest is self.snap:
            raise no_worker(role)
        self.snap = newest

    # -- decode ---------------------------------------------------------------------------------------------------------

    async def _decode(self, hand_off: HandOff) -> Answer:
        """The decode leg; another worker while the hand-off is untouched and young. Raises _PrefillAgainError."""
        while True:
            self._check_age(hand_off)
            worker, running = self._decide()
            lease = self.life.table.lease(worker)
            connection: Connection | None = None
            try:
                try:
                    connection = worker.pool.pop()
                    if connection is None:
                        connection = await worker.pool.connect()
                        # Connecting may have taken as long as the lease.
                        self._check_age(hand_off)
                    counted = hand_off.id if self.snap.settings.capture.dir and self.signature is not None else ""
                    body = vllm.decode_parts(self.request.body, hand_off.params, counted)
                    parts = self._post(worker, hand_off.id, body)
                    hand_off.given = True
                    limit_s = self.snap.settings.timeouts.first_byte_s
                    head = await connection.send(parts, limit_s, with_body=self.request.stream)
                except asyncio.CancelledError:
                    if hand_off.given:
                        # D ends an aborted request's hand-off itself.
                        hand_off.end("consumed")
                    raise
                except UpstreamError as e:
                    self.retries.failed(worker, e)
                    self.retries.again("decode", e)
                    if e.phase != "connect":
                        # D may have begun to pull: a hand-off that is used twice gives wrong tokens.
                        raise _PrefillAgainError from None
                    continue
                self.retries.answered(worker, head.status)
                start = connection.peek() if self.request.stream else b""
                failed = head.status >= 500 or (head.status == 200 and vllm.failed_stream(start))
                if failed and self._prefill_is_gone():
                    self.retries.spend("decode", "prefill_lost")
                    raise _PrefillAgainError
                if head.status == 200:
                    hand_off.end("consumed")
                elif head.status < 500:
                    # D refused the request before its engine saw it: nobody reads the blocks.
                    self.life.releaser.release(hand_off, self.snap)
                if not self.snap.settings.capture.dir:
                    # Tens of kilobytes that a long stream has no use for.
                    self.signature = None
                return await self._relay(worker, connection, head, failed=failed)
            finally:
                if connection is not None:
                    connection.release()
                lease.end()
                self.snap.decode_policy.ended(running, monotonic(), self._tpot())

    def _check_age(self, hand_off: HandOff) -> None:
        """Raises _PrefillAgainError for a hand-off too old to be used, Failure if no try is left."""
        if monotonic() - hand_off.opened > self.snap.settings.timeouts.handoff_s:
            hand_off.end("expired")
            self.retries.spend("decode", "handoff_expired")
            raise _PrefillAgainError

    def _prefill_is_gone(self) -> bool:
        """Whether the worker that holds this request's KV has died since."""
        return not any(w.usable for w in self.snap.prefill.workers if w.name == self.record.prefill)

    def _tpot(self) -> float | None:
        """Mean seconds a token of an answer that was streamed to its end, if it is long enough to say."""
        record = self.record
        if not self.request.stream or record.outcome or record.output_tokens < _TPOT_TOKENS or not record.ended:
            return None
        return (record.ended - record.first) / (record.output_tokens - 1)

    def _decide(self) -> tuple[Worker, object]:
        """The decode worker, and the policy's admission of the request there, which must be ended."""
        snap, record, signature = self.snap, self.record, self.signature
        counts: NDArray[np.int32] | None = None
        tokens = 0
        if snap.decode_policy.wants_signature and signature is not None and signature.state == "exact":
            if snap.partition is None or snap.partition.geometry == signature.geometry:
                counts, tokens = signature.counts.reshape(signature.geometry.shape), signature.tokens
            else:
                record.signature = "mismatch"
        try:
            decision: Decision = snap.decode_policy.choose(
                snap.decode.in_flight(), self.retries.usable(snap.decode), counts, tokens, self.request.label
            )
        except NoWorkerError:
            self._move_on("decode")
            return self._decide()
        worker = snap.decode.workers[decision.worker]
        record.decode, record.decode_reason = worker.name, decision.reason
        record.score, record.candidates = decision.score, decision.candidates
        record.decided = monotonic()
        self.life.metrics.routed.labels("decode", worker.name, decision.reason).inc()
        return worker, snap.decode_policy.admitted(decision.worker, counts, tokens, record.decided)

    async def _relay(self, worker: Worker, connection: Connection, head: Head, *, failed: bool) -> Answer:
        client, record = self.client, self.record
        tracker = connection.tracker
        assert tracker is not None
        extra = (b"x-eldrd-decode", worker.label)
        if head.status != 200 or not client.can_relay(tracker):
            body = await self._collected(worker, connection)
            if head.status == 200:
                record.first = monotonic()
                self._count_output(body[-_TAIL:], body.count(b"data: "), complete=True)
            return Answer(head.status, body, [*head.end_to_end, extra])
        if failed:
            body = await self._collected(worker, connection)
            status, error = vllm.error_of_stream(body)
            return Answer(status, error, [(b"content-type", b"application/json"), extra])
        write = client.start(head, tracker, extra, connection.take())
        record.first = monotonic()
        if connection.complete:
            # All of it was here already: nothing to wait for, nothing to hold back.
            self._count_output(b"".join(connection.tail), tracker.chunks, complete=True)
            return _RELAYED
        done = connection.relay(write)
        client.attach(connection)
        self.life.watch.add(connection)
        complete = False
        try:
            await done
            complete = True
        except UpstreamError as e:
            record.outcome = f"decode_lost_{e.cause}"
            self.retries.failed(worker, e)
            message = "The decode worker was lost before the answer was complete."
            # A client that does not read never sees the event, and closing waits for it.
            whole = e.cause != "stalled" and between_events(head, tracker, b"".join(connection.tail))
            client.fail(message, whole_events=whole)
        finally:
            self.life.watch.remove(connection)
            client.detach()
            self._count_output(b"".join(connection.tail), tracker.chunks, complete=complete)
        return _RELAYED if complete else Answer(head.status, b"", [], relayed=True, complete=False)

    async def _collected(self, worker: Worker, connection: Connection) -> bytes:
        try:
            return await connection.collect(self.snap.settings.timeouts.first_byte_s, vllm.MAX_ANSWER)
        except UpstreamError as e:
            self.retries.failed(worker, e)
            raise final("decode", e) from None

    def _count_output(self, tail: bytes, events: int, *, complete: bool) -> None:
        """Output tokens from the usage at the end of the answer, else the number of its events less [DONE]. Only complete
        answers are captured."""
        record = self.record
        record.ended = monotonic()
        record.events = max(0, events - 1) if self.request.stream else 0
        tokens = vllm.completion_tokens(tail)
        record.output_tokens = record.events if tokens is None else tokens
        if complete and self.signature is not None and self.snap.settings.capture.dir:
            self.life.captured(self.signature, record.output_tokens, self.request.label)

    def _post(self, worker: Worker, id_: str, parts: list[Any]) -> list[Any]:
        """A request for one worker, head first."""
        length = sum(len(p) for p in parts)
        headers = self.request.passed_headers + self.snap.worker_headers
        head = vllm.post(self.request.path, worker.pool.netloc, id_, length, headers)
        return [head, *parts]
