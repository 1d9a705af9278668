"""One request of a chaos run: made from its number, sent by a client that may leave, and its answer judged. No fleet."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import aiohttp
import orjson
from multidict import CIMultiDict

from loadgen.chaos_faults import TEXTS
from loadgen.fleet.protocol import ApiError, parse
from loadgen.fleet.sequence import outputs

if TYPE_CHECKING:
    from loadgen.fleet.model import EmulatedMoE

Leaves = Literal["never", "in_the_body", "early", "mid_stream"]

_ID = re.compile(rb'"id":"(?:chat)?cmpl-([^"]+)"')
_ERROR_EVENT = b'data: {"error":'
_ALLOWED = frozenset((400, 422, 500, 502, 503, 504))


class Wrong(Exception):
    """An answer that must not be; the message says why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """index; path and body; expected: the texts a fault-free fleet answers by choice, None where the body is no valid request;
    leaves: when the client closes its connection; after: seconds (early) or bytes (mid_stream)."""

    index: int
    path: str
    body: bytes
    stream: bool
    expected: list[str] | None
    leaves: Leaves
    after: float

    def describe(self) -> str:
        return f"{self.path}, stream={self.stream}, leaves={self.leaves}"


@dataclass(slots=True)
class Fate:
    """What the client got. cut: the connection ended before the message; left: the client closed it."""

    status: int = 0
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""
    cut: bool = False
    left: bool = False

    @property
    def id(self) -> str | None:
        """The worker's request id in the answer."""
        found = _ID.search(self.body, 0, 4096)
        return None if found is None else found[1].decode()


def make(model: EmulatedMoE, seed: int, index: int) -> Ask:
    """Request ``index`` of the run."""
    rng = random.Random(f"{seed}/{index}")
    chat = rng.random() < 0.4
    stream = rng.random() < 0.7
    words = model.vocabulary.words
    # Some prompts begin alike, so that prefix caches and the prefix choice are in play; all end with their number.
    shared = [words[1 + rng.randrange(5) + i] for i in range(rng.choice((0, 0, 40, 200)))]
    own = [rng.choice(words[1:]) for _ in range(rng.randint(1, 60))]
    prompt = " ".join([*shared, *own, f"n{index}"])
    body: dict[str, Any] = {"model": model.spec.name, "seed": rng.randrange(1000), "max_tokens": _tokens(rng)}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if stream:
        body["stream"] = True
        if rng.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.06:
        body["n"] = rng.randint(2, 4)
    elif not chat and rng.random() < 0.04:
        body["prompt"] = [prompt, f"{prompt} too"]
    if rng.random() < 0.1:
        body["stop"] = [rng.choice("aeiou")]
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.02:
        body["max_tokens"] = rng.choice((-1, 99_999))
    if rng.random() < 0.01:
        del body["prompt" if not chat else "messages"]
    data = orjson.dumps(body)
    try:
        call = parse(data, chat=chat, model=model)
        expected = ["".join(o.pieces) for o in outputs(call, model)]
    except ApiError:
        expected = None
    leaves: Leaves = rng.choices(("never", "in_the_body", "early", "mid_stream"), (80, 3, 8, 9))[0]
    after = rng.uniform(0, 0.02) if leaves == "early" else float(rng.randrange(4000))
    return Ask(index, "/v1/chat/completions" if chat else "/v1/completions", data, stream, expected, leaves, after)


def _tokens(rng: random.Random) -> int:
    return 1 if rng.random() < 0.1 else rng.randint(2, 24)


async def send(http: aiohttp.ClientSession, url: str, ask: Ask) -> Fate:
    """Send it and take what comes, until its client leaves."""
    if ask.leaves == "in_the_body":
        return await _half(url, ask)
    fate = Fate()
    task = asyncio.create_task(_exchange(http, url, ask, fate))
    if ask.leaves == "early":
        _, pending = await asyncio.wait((task,), timeout=ask.after)
        if pending:
            fate.left = True
            task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if not fate.left:
            task.cancel()
            raise
    return fate


async def _exchange(http: aiohttp.ClientSession, url: str, ask: Ask, fate: Fate) -> None:
    got = bytearray()
    try:
        # Its number is in eldrd's log as client_id.
        headers = {"Content-Type": "application/json", "X-Request-Id": str(ask.index)}
        async with http.post(url + ask.path, data=ask.body, headers=headers) as r:
            fate.status, fate.headers = r.status, CIMultiDict(r.headers)
            async for part in r.content.iter_any():
                got += part
                if ask.leaves == "mid_stream" and len(got) >= ask.after:
                    fate.left = True
                    r.close()
                    break
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError):
        fate.cut = True
    finally:
        fate.body = bytes(got)


async def _half(url: str, ask: Ask) -> Fate:
    """A client that leaves in the middle of its own request."""
    at = urlsplit(url)
    _, writer = await asyncio.open_connection(at.hostname, at.port)
    head = f"POST {ask.path} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {len(ask.body)}\r\n\r\n"
    writer.write(head.encode() + ask.body[: len(ask.body) // 2])
    await writer.drain()
    writer.close()
    return Fate(left=True)


def check(ask: Ask, fate: Fate, sent: bytes | None) -> str:
    """The outcome of an answer, given what its decode worker sent for it. Raises Wrong."""
    if fate.status == 0:
        if fate.left:
            return "left"
        raise Wrong("the connection ended without an answer")
    if fate.status != 200:
        return _error(ask, fate)
    if ask.expected is None:
        # P is asked for one token: where that ends the answer, nobody sees that too many were asked for.
        if fate.headers.get("x-eldrd-decode") is None:
            return "ok_at_prefill"
        raise Wrong("an invalid request was answered 200")
    body, ended_by_us = fate.body, False
    if len(ask.expected) > 1:
        # Merged of several workers' answers: the texts tell.
        if ask.stream and fate.cut:
            body, ended_by_us = _without_our_error(body, whole=not fate.left)
    elif sent is None:
        if fate.headers.get("x-eldrd-decode") is not None and fate.id is not None:
            raise Wrong("the decode worker it names has not sent it")
        if fate.cut and fate.id is not None:
            raise Wrong("an answer finished at prefill was cut")
    elif fate.cut or fate.left:
        if ask.stream and not sent.startswith(body):
            body, ended_by_us = _without_our_error(body, whole=not fate.left)
        if not sent.startswith(body):
            raise Wrong(f"byte {_differ(sent, body)} of {len(body)} is not what the decode worker sent")
    elif body != sent:
        raise Wrong(f"whole, but byte {_differ(sent, body)} of {len(body)} is not what the decode worker sent")
    texts = _texts(body)
    for index, text in texts.items():
        if not ask.expected[index].startswith(text) and not text.startswith(TEXTS):
            raise Wrong(f"the text of choice {index} is another request's")
    if fate.left:
        return "left"
    if fate.cut:
        return "lost_with_event" if ended_by_us else "lost"
    if ask.stream and not body.endswith(b"data: [DONE]\n\n"):
        raise Wrong("a stream ended as if whole, without [DONE]")
    if len(texts) != len(ask.expected) and _ERROR_EVENT in body:
        return "worker_error_event"
    if len(texts) != len(ask.expected):
        raise Wrong(f"{len(texts)} of {len(ask.expected)} choices")
    if len(texts) > 1:
        return "ok_merged"
    return "ok" if sent is not None else "ok_at_prefill"


def _error(ask: Ask, fate: Fate) -> str:
    if fate.cut or fate.left:
        return f"http_{fate.status}"
    if fate.status not in _ALLOWED:
        raise Wrong(f"status {fate.status}")
    try:
        error = orjson.loads(fate.body)["error"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        raise Wrong(f"status {fate.status} without an error object") from None
    if error["code"] != fate.status or not isinstance(error["message"], str):
        raise Wrong(f"status {fate.status} with another error object")
    if fate.status in (502, 503, 504) and ask.expected is None and ask.leaves == "never":
        return "http_bad_and_unlucky"
    return f"http_{fate.status}"


def _without_our_error(body: bytes, *, whole: bool) -> tuple[bytes, bool]:
    """The body less the event with which eldrd tells of a lost worker, which is the last and, if its client waited, whole."""
    head, found, tail = body.rpartition(_ERROR_EVENT)
    if not found:
        return body, False
    if whole:
        try:
            code = orjson.loads((found + tail).removeprefix(b"data: "))["error"]["code"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise Wrong("eldrd's error event is broken") from None
        if code != 502 or not tail.endswith(b"\n\n"):
            raise Wrong("eldrd's error event is another")
        if head and not head.endswith(b"\n\n"):
            raise Wrong("eldrd's error event is inside another")
    return head, True


def _texts(body: bytes) -> dict[int, str]:
    """The text of each choice in all whole events, or in a whole answer; of a cut one none."""
    if body.startswith(b"data: "):
        events = [e.removeprefix(b"data: ") for e in body.split(b"\n\n")[:-1]]
        objects = [orjson.loads(e) for e in events if e != b"[DONE]"]
    else:
        try:
            objects = [orjson.loads(body)]
        except orjson.JSONDecodeError:
            objects = []
    out: dict[int, str] = {}
    for o in objects:
        for choice in o.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or choice
            index = choice["index"]
            out[index] = out.get(index, "") + (part.get("text") or part.get("content") or "")
    return out


def _differ(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
