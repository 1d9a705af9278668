"""The prefill leg: from a request to a hand-off, or to the final answer. Decides no decode worker, writes to no client."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson

from eldrd.fleet import vllm
from eldrd.fleet.connection import UpstreamError
from eldrd.handoff.answer import Answer
from eldrd.handoff.failure import bad_gateway
from eldrd.routing.policy import NoWorkerError

if TYPE_CHECKING:
    from eldrd.fleet.connection import Connection
    from eldrd.fleet.framing import Head
    from eldrd.fleet.worker import Worker
    from eldrd.handoff.ledger import HandOff
    from eldrd.handoff.way import Way


async def prefill(way: Way) -> HandOff | Answer:
    """The prefill leg, on another worker if one fails before it answered: a hand-off, or the final answer."""
    request, life, record = way.request, way.life, way.record
    while True:
        way.attempt += 1
        eldr_id = request.id if way.attempt == 1 else f"{request.id}-{way.attempt}"
        if way.wants_signature:
            life.receiver.expect(eldr_id)
        hand_off: HandOff | None = None
        try:
            worker = _worker(way)
            head, body = await _once(way, worker, eldr_id)
            if head.status != 200:
                return Answer(head.status, body, head.end_to_end)
            answer = _parsed(way, body)
            params = vllm.transfer_params(answer)
            if request.single_token or vllm.finished(answer):
                if params is not None:
                    unused = life.ledger.open(eldr_id, worker.name, params, monotonic())
                    life.releaser.release(unused, way.snap)
                return _early(way, answer, head.end_to_end)
            if params is None:
                raise bad_gateway("prefill", "no_transfer_params")
            hand_off = life.ledger.open(eldr_id, worker.name, params, record.prefilled)
            return hand_off
        except UpstreamError as e:
            way.retries.again("prefill", e)
        finally:
            if hand_off is None:
                life.receiver.forget(eldr_id)


def _worker(way: Way) -> Worker:
    while True:
        snap, record = way.snap, way.record
        usable = way.usable(snap.prefill)
        try:
            decision = snap.prefill_policy.choose(way.request.prefix, snap.prefill.in_flight(), usable)
        except NoWorkerError:
            way.move_on("prefill")
            continue
        worker = snap.prefill.workers[decision.worker]
        record.prefill, record.prefill_reason = worker.name, decision.reason
        way.life.metrics.routed.labels("prefill", worker.name, decision.reason).inc()
        return worker


async def _once(way: Way, worker: Worker, eldr_id: str) -> tuple[Head, bytes]:
    request, snap = way.request, way.snap
    body = vllm.prefill_body(request.fields, eldr_id, hand_off=not request.single_token)
    limit_s = snap.settings.timeouts.prefill_s
    lease = way.life.table.lease(worker)
    connection: Connection | None = None
    adopted = False
    started = monotonic()
    try:
        connection = worker.pool.pop() or await worker.pool.connect()
        head = await connection.send(way.post(worker, eldr_id, [body]), limit_s)
        answer = connection.body() if connection.complete else await connection.collect(limit_s, vllm.MAX_ANSWER)
        way.answered(worker, head.status)
    except UpstreamError as e:
        way.retries.failed(worker, e)
        raise
    except asyncio.CancelledError:
        if connection is not None:
            adopted = True
            way.life.releaser.adopt(connection, eldr_id, worker, lease, snap)
        raise
    finally:
        if not adopted:
            if connection is not None:
                connection.release()
            lease.end()
    way.record.prefilled = now = monotonic()
    way.life.metrics.prefill.observe(now - started)
    return head, answer


def _parsed(way: Way, body: bytes) -> dict[str, Any]:
    try:
        answer = vllm.parsed(body, chat=way.request.chat)
    except ValueError:
        raise bad_gateway("prefill", "invalid_answer") from None
    if usage := answer.get("usage"):
        way.record.prompt_tokens = usage.get("prompt_tokens") or 0
        if details := usage.get("prompt_tokens_details"):
            way.record.cached_tokens = details.get("cached_tokens") or 0
    return answer


def _early(way: Way, answer: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> Answer:
    """P's answer as the client's, where its one token is all there is."""
    way.record.output_tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
    way.record.decode_reason = "finished_at_prefill"
    way.record.first = way.record.ended = monotonic()
    answer.pop(vllm.TRANSFER, None)
    if not way.request.stream:
        return Answer(200, orjson.dumps(answer), headers)
    events = vllm.early_stream(answer, chat=way.request.chat, include_usage=way.request.include_usage)
    return Answer(200, events, [(b"content-type", b"text/event-stream; charset=utf-8")])
