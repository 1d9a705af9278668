"""The decode leg: from a hand-off to the end of the answer at the client. Chooses the worker through the policy only."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Final

from eldrd.fleet import vllm
from eldrd.fleet.connection import UpstreamError
from eldrd.fleet.events import between_events
from eldrd.handoff.answer import Answer
from eldrd.handoff.retry import final
from eldrd.handoff.way import PrefillAgainError
from eldrd.routing.policy import NoWorkerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from eldrd.fleet.connection import Connection
    from eldrd.fleet.framing import Head
    from eldrd.fleet.worker import Worker
    from eldrd.handoff.ledger import HandOff
    from eldrd.handoff.way import Way
    from eldrd.routing.policy import Decision

# A shorter answer's mean gap says more of its first events than of the worker's steps.
_TPOT_TOKENS: Final = 16
_TAIL: Final = 4096  # where the usage is in a collected answer
_RELAYED: Final = Answer(200, b"", [], relayed=True)


async def decode(way: Way, hand_off: HandOff) -> Answer:
    """The decode leg; another worker while the hand-off is untouched and young. Raises PrefillAgainError."""
    while True:
        _check_age(way, hand_off)
        worker, running = _decide(way)
        lease = way.life.table.lease(worker)
        connection: Connection | None = None
        try:
            try:
                connection = worker.pool.pop()
                if connection is None:
                    connection = await worker.pool.connect()
                    # Connecting may have taken as long as the lease.
                    _check_age(way, hand_off)
                counted = hand_off.id if way.snap.settings.capture.dir and way.signature is not None else ""
                body = vllm.decode_parts(way.request.body, hand_off.params, counted)
                parts = way.post(worker, hand_off.id, body)
                hand_off.given = True
                limit_s = way.snap.settings.timeouts.first_byte_s
                enough = vllm.start_is_known if way.request.stream else None
                head = await connection.send(parts, limit_s, enough=enough)
            except asyncio.CancelledError:
                if hand_off.given:
                    # D ends an aborted request's hand-off itself.
                    hand_off.end("consumed")
                raise
            except UpstreamError as e:
                way.retries.failed(worker, e)
                way.retries.again("decode", e)
                if e.phase != "connect":
                    # D may have begun to pull: a hand-off that is used twice gives wrong tokens.
                    raise PrefillAgainError from None
                continue
            way.answered(worker, head.status)
            start = connection.peek() if way.request.stream else b""
            failed = head.status >= 500 or (head.status == 200 and vllm.failed_stream(start))
            if failed and _prefill_is_gone(way):
                way.retries.spend("decode", "prefill_lost")
                raise PrefillAgainError
            if head.status == 200:
                hand_off.end("consumed")
                worker.met.add(hand_off.engine)
            elif head.status < 500:
                # D refused the request before its engine saw it: nobody reads the blocks.
                way.life.releaser.release(hand_off, way.snap)
            if not way.snap.settings.capture.dir:
                # Tens of kilobytes that a long stream has no use for.
                way.signature = None
            return await _relay(way, worker, connection, head, failed=failed)
        finally:
            if connection is not None:
                connection.release()
            lease.end()
            way.snap.decode_policy.ended(running, monotonic(), _tpot(way))


def _check_age(way: Way, hand_off: HandOff) -> None:
    """Raises PrefillAgainError for a hand-off too old to be used, Failure if no try is left."""
    if monotonic() - hand_off.opened > way.snap.settings.timeouts.handoff_s:
        hand_off.end("expired")
        way.retries.spend("decode", "handoff_expired")
        raise PrefillAgainError


def _prefill_is_gone(way: Way) -> bool:
    """Whether the worker that holds this request's KV has died since."""
    return not any(w.usable for w in way.snap.prefill.workers if w.name == way.record.prefill)


def _tpot(way: Way) -> float | None:
    """Mean seconds a token of an answer that was streamed to its end, if it is long enough to say."""
    record = way.record
    if not way.request.stream or record.outcome or record.output_tokens < _TPOT_TOKENS or not record.ended:
        return None
    return (record.ended - record.first) / (record.output_tokens - 1)


def _decide(way: Way) -> tuple[Worker, object]:
    """The decode worker, and the policy's admission of the request there, which must be ended."""
    snap, record, signature = way.snap, way.record, way.signature
    counts: NDArray[np.int32] | None = None
    tokens = 0
    if snap.decode_policy.wants_signature and signature is not None and signature.state == "exact":
        if snap.partition is None or snap.partition.geometry == signature.geometry:
            counts, tokens = signature.counts.reshape(signature.geometry.shape), signature.tokens
        else:
            record.signature = "mismatch"
    try:
        decision: Decision = snap.decode_policy.choose(
            snap.decode.in_flight(), way.usable(snap.decode), counts, tokens, way.request.label
        )
    except NoWorkerError:
        way.move_on("decode")
        return _decide(way)
    worker = snap.decode.workers[decision.worker]
    record.decode, record.decode_reason = worker.name, decision.reason
    record.score, record.candidates = decision.score, decision.candidates
    record.decided = monotonic()
    way.life.metrics.routed.labels("decode", worker.name, decision.reason).inc()
    return worker, snap.decode_policy.admitted(decision.worker, counts, tokens, record.decided)


async def _relay(way: Way, worker: Worker, connection: Connection, head: Head, *, failed: bool) -> Answer:
    client, record = way.client, way.record
    tracker = connection.tracker
    assert tracker is not None
    extra = (b"x-eldrd-decode", worker.label)
    if head.status != 200 or not client.can_relay(tracker):
        body = await _collected(way, worker, connection)
        if head.status == 200:
            record.first = monotonic()
            _count_output(way, body[-_TAIL:], body.count(b"data: "), complete=True)
        return Answer(head.status, body, [*head.end_to_end, extra])
    if failed:
        body = await _collected(way, worker, connection)
        status, error = vllm.error_of_stream(body)
        return Answer(status, error, [(b"content-type", b"application/json"), extra])
    write = client.start(head, tracker, extra, connection.take())
    record.first = monotonic()
    if connection.complete:
        # All of it was here already: nothing to wait for, nothing to hold back.
        _count_output(way, b"".join(connection.tail), tracker.chunks, complete=True)
        return _RELAYED
    done = connection.relay(write)
    client.attach(connection)
    way.life.watch.add(connection)
    complete = False
    try:
        await done
        complete = True
    except UpstreamError as e:
        record.outcome = f"decode_lost_{e.cause}"
        way.retries.failed(worker, e)
        message = "The decode worker was lost before the answer was complete."
        # A client that does not read never sees the event, and closing waits for it.
        whole = e.cause != "stalled" and between_events(head, tracker, b"".join(connection.tail))
        client.fail(message, whole_events=whole)
    finally:
        way.life.watch.remove(connection)
        client.detach()
        _count_output(way, b"".join(connection.tail), tracker.chunks, complete=complete)
    return _RELAYED if complete else Answer(head.status, b"", [], relayed=True, complete=False)


async def _collected(way: Way, worker: Worker, connection: Connection) -> bytes:
    try:
        return await connection.collect(way.snap.settings.timeouts.first_byte_s, vllm.MAX_ANSWER)
    except UpstreamError as e:
        way.retries.failed(worker, e)
        raise final("decode", e) from None


def _count_output(way: Way, tail: bytes, events: int, *, complete: bool) -> None:
    """Output tokens from the usage at the end of the answer, else the number of its events less [DONE]. Only complete
    answers are captured."""
    record = way.record
    record.ended = monotonic()
    record.events = max(0, events - 1) if way.request.stream else 0
    tokens = vllm.completion_tokens(tail)
    record.output_tokens = record.events if tokens is None else tokens
    if complete and way.signature is not None and way.snap.settings.capture.dir:
        way.life.captured(way.signature, record.output_tokens, way.request.label)
