"""Requests for several sequences (n, lists of prompts) or under an alias: one hand-off each, one answer merged of all.

A hand-off carries the KV of one sequence, so each choice is a request of its own with its own prefill (after the first
mostly a prefix-cache hit) and its own decode worker. Choices are numbered as vLLM numbers them: prompt * n + sample.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from eldrd.fleet.events import DONE, ChunkDecoder, EventSplitter
from eldrd.fleet.framing import BodyTracker, Head
from eldrd.handoff.answer import Answer
from eldrd.handoff.failure import Failure, bad_gateway
from eldrd.handoff.request import Record, prefix_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from eldrd.fleet.connection import Connection
    from eldrd.handoff.answer import Client
    from eldrd.handoff.request import Request

    Serve = Callable[[Request, Client, Record], Awaitable[Answer]]

_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_JSON = (b"content-type", b"application/json")
_DECODE = b"x-eldrd-decode"
_FIRST = (
    "prefill",
    "prefill_reason",
    "decode",
    "decode_reason",
    "score",
    "candidates",
    "signature",
    "prefilled",
    "decided",
)


def split(request: Request) -> list[Request]:
    """One request per choice. A seed is counted up over the samples of a prompt, as vLLM does
    (vllm/v1/engine/parallel_sampling.py)."""
    prompts = (None,) if request.prompts is None else request.prompts
    parts: list[Request] = []
    for prompt in prompts:
        for sample in range(request.samples):
            fields = {k: v for k, v in request.fields.items() if k not in ("n", "best_of")}
            fields["model"] = request.model
            if prompt is not None:
                fields["prompt"] = prompt
            if sample and isinstance(fields.get("seed"), int):
                fields["seed"] += sample
            if request.stream:
                fields["stream_options"] = {**(fields.get("stream_options") or {}), "include_usage": True}
            id_ = f"{request.id}-{len(parts)}"
            parts.append(
                msgspec.structs.replace(
                    request,
                    id=id_,
                    body=orjson.dumps(fields),
                    fields=fields,
                    prefix=request.prefix if prompt is None else prefix_of(prompt),
                    include_usage=True,
                    samples=1,
                    prompts=None,
                    alias=None,
                )
            )
    return parts


class _RefusedError(Exception):
    """A worker answered one part with an error, which is then the answer to all."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class _LostError(Exception):
    """One part ended in the middle."""


async def serve(request: Request, client: Client, record: Record, part: Serve) -> Answer:
    """Serve all parts at once by ``part`` and merge their answers. Raises Failure as ``part`` does; if one part fails,
    the others are ended."""
    merge = _Merge(request, client)
    parts = split(request)
    records = [Record(arrived=record.arrived) for _ in parts]
    tasks = [
        asyncio.get_running_loop().create_task(_one(merge, i, p, r, part))
        for i, (p, r) in enumerate(zip(parts, records, strict=True))
    ]
    try:
        await asyncio.gather(*tasks)
    except _RefusedError as e:
        if not merge.started:
            return e.answer
        merge.fail("A worker refused a part of the request.")
    except _LostError:
        if not merge.started:
            raise bad_gateway("decode", "lost") from None
        merge.fail("A decode worker was lost before the answer was complete.")
    except Failure as e:
        if not merge.started:
            raise
        merge.fail(e.message)
    else:
        try:
            return merge.finish(records)
        except (TypeError, KeyError, AttributeError, ValueError):
            if not merge.started:
                raise bad_gateway("decode", "invalid_answer") from None
            merge.fail("A decode worker's answer cannot be read.")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.detach()
        _gather_record(record, records, request.samples)
    record.outcome = "part_lost"
    return Answer(200, b"", [], relayed=True, complete=False)


async def _one(merge: _Merge, index: int, request: Request, record: Record, part: Serve) -> None:
    answer = await part(request, _Part(merge, index), record)
    if answer.relayed:
        # Without [DONE] it has lost events, for example in a coding that is not taken off.
        if not answer.complete or index not in merge.ended:
            raise _LostError
    elif answer.status != 200:
        raise _RefusedError(answer)
    elif request.stream:
        merge.take(index, EventSplitter().feed(answer.body), _decode_field(answer.headers))
    else:
        try:
            merge.whole[index] = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            raise bad_gateway("decode", "invalid_answer") from None
        merge.field = merge.field or _decode_field(answer.headers)


def _decode_field(headers: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
    """What names the decode worker; None for an answer that ended at prefill."""
    return next((field for field in headers if field[0] == _DECODE), None)


def _gather_record(record: Record, records: list[Record], samples: int) -> None:
    """The request's record from its parts': the first part's workers, everybody's tokens and retries."""
    first = records[0]
    for name in (
        "prefill",
        "prefill_reason",
        "decode",
        "decode_reason",
        "score",
        "candidates",
        "signature",
        "prefilled",
        "decided",
    ):
        setattr(record, name, getattr(first, name))
    started = [r.first for r in records if r.first]
    record.first = min(started) if started else 0.0
    record.prompt_tokens = sum(r.prompt_tokens for r in records[::samples])
    record.cached_tokens = sum(r.cached_tokens for r in records[::samples])
    record.output_tokens = sum(r.output_tokens for r in records)
    record.retries = [retry for r in records for retry in r.retries]
    record.parts = len(records)


class _Merge:
    """Writes the parts' events as one stream, or merges their whole answers."""

    def __init__(self, request: Request, client: Client) -> None:
        self._request = request
        self._client = client
        self._write: Callable[[bytes], object] | None = None
        self._created: int | None = None
        self._usage: dict[int, dict[str, Any]] = {}
        self._connections: set[Connection] = set()
        self._paused = False
        # Parts whose [DONE] has come.
        self.ended: set[int] = set()
        self.whole: dict[int, dict[str, Any]] = {}
        # Names the decode worker of the first part that answered.
        self.field: tuple[bytes, bytes] | None = None

    @property
    def started(self) -> bool:
        return self._write is not None

    def take(self, index: int, events: list[bytes], field: tuple[bytes, bytes] | None) -> None:
        """Pass on the events of one part. An error event ends the part."""
        for data in events:
            if data == DONE:
                self.ended.add(index)
                continue
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError:
                raise _LostError from None
            if "error" in event:
                raise _LostError
            if event.get("usage"):
                self._usage[index] = event["usage"]
            if event.get("choices"):
                self._start(field)
                self._send(self._renamed(event, index))

    def _renamed(self, event: dict[str, Any], index: int) -> dict[str, Any]:
        request = self._request
        if self._created is None:
            self._created = event.get("created")
        event["id"] = f"{'chatcmpl' if request.chat else 'cmpl'}-{request.id}"
        event["created"] = self._created
        event["model"] = request.alias or event.get("model")
        for choice in event["choices"]:
            choice["index"] = index
        if not request.include_usage:
            event.pop("usage", None)
        return event

    def _start(self, field: tuple[bytes, bytes] | None) -> None:
        if self._write is None:
            head = Head(1, 200, b"OK", [_EVENTS, (b"transfer-encoding", b"chunked")])
            self._write = self._client.start(head, BodyTracker(head), field)
            self._client.attach(self)

    def _send(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + orjson.dumps(event) + b"\n\n")

    def _chunk(self, payload: bytes) -> None:
        assert self._write is not None
        self._write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def finish(self, records: list[Record]) -> Answer:
        """All parts are complete: the end of the stream, or the merged answer."""
        request = self._request
        if not request.stream:
            return Answer(200, orjson.dumps(self._merged()), [_JSON] if self.field is None else [_JSON, self.field])
        self._start((_DECODE, records[0].decode.encode()) if records[0].decode else None)
        if request.include_usage:
            base: dict[str, Any] = {
                "object": "chat.completion.chunk" if request.chat else "text_completion",
                "created": self._created,
            }
            model = request.alias or request.model
            self._send(self._renamed({**base, "model": model, "choices": [], "usage": self._sum(self._usage)}, 0))
        self._chunk(b"data: [DONE]\n\n")
        assert self._write is not None
        self._write(b"0\r\n\r\n")
        return Answer(200, b"", [], relayed=True)

    def _merged(self) -> dict[str, Any]:
        answers = [self.whole[i] for i in range(len(self.whole))]
        merged = self._renamed({**answers[0], "choices": []}, 0)
        for index, answer in enumerate(answers):
            for choice in answer.get("choices", []):
                choice["index"] = index
                merged["choices"].append(choice)
        merged["usage"] = self._sum({i: a.get("usage") or {} for i, a in enumerate(answers)})
        return merged

    def _sum(self, usages: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """Prompt tokens count once a prompt, completion tokens once a choice."""
        samples = self._request.samples
        first = [u for i, u in usages.items() if i % samples == 0]
        prompt = sum(u.get("prompt_tokens") or 0 for u in first)
        completion = sum(u.get("completion_tokens") or 0 for u in usages.values())
        total = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        details = [u["prompt_tokens_details"] for u in first if u.get("prompt_tokens_details")]
        if details:
            cached = sum(d.get("cached_tokens") or 0 for d in details)
            return {**total, "prompt_tokens_details": {"cached_tokens": cached}}
        return total

    def fail(self, message: str) -> None:
        self._client.fail(message, whole_events=True)

    # -- flow control: the client's pauses are every part's (handoff.answer.Flow) -----------------------------------------

    def add(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._paused:
            connection.pause()

    def discard(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def pause(self) -> None:
        self._paused = True
        for connection in self._connections:
            connection.pause()

    def resume(self) -> None:
        self._paused = False
        for connection in self._connections:
            connection.resume()


class _Part:
    """The client as one part's lifecycle sees it (handoff.answer.Client)."""

    def __init__(self, merge: _Merge, index: int) -> None:
        self._merge = merge
        self._index = index
        self._decoder = ChunkDecoder()
        self._splitter = EventSplitter()
        self._field: tuple[bytes, bytes] | None = None
        self._connection: Connection | None = None
        self._broken = False

    def can_relay(self, tracker: BodyTracker) -> bool:
        return self._merge._request.stream and tracker.chunked

    def start(
        self,
        head: Head,  # noqa: ARG002
        tracker: BodyTracker,  # noqa: ARG002
        extra: tuple[bytes, bytes] | None,
        body: bytes = b"",
    ) -> Callable[[bytes], object]:
        self._field = extra
        self._bytes(body)
        return self._bytes

    def _bytes(self, data: bytes) -> None:
        """Called by the connection: an exception must not go there."""
        if self._broken:
            return
        try:
            self._merge.take(self._index, self._splitter.feed(self._decoder.feed(data)), self._field)
        except (_LostError, ValueError, ConnectionError, TypeError, AttributeError, KeyError):
            # The last three: an event that is none.
            self._broken = True
            if self._connection is not None:
                self._connection.stall("framing")

    def attach(self, connection: Any) -> None:
        self._connection = connection
        self._merge.add(connection)
        if self._broken:
            connection.stall("framing")

    def detach(self) -> None:
        if self._connection is not None:
            self._merge.discard(self._connection)

    def fail(self, message: str, *, whole_events: bool) -> None:
        """The merge tells the client once, for all parts."""
