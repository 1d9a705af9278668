"""vLLM's dialect: the bodies that prefill and decode get and what their answers hold. Pure functions; no sockets.

Hand-off fields as in vllm/distributed/kv_transfer/kv_connector/v1/nixl (pull): prefill gets ``do_remote_decode``, its
answer's ``kv_transfer_params`` go verbatim to decode.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

TRANSFER: Final = "kv_transfer_params"
MAX_ANSWER: Final = 1 << 30
_REQUEST_HANDOFF: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_HEAD: Final = (
    b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nX-Request-Id: %b\r\n%b\r\n"
)
_DROPPED_ON_PREFILL: Final = ("stream", "stream_options", "n", "best_of")
_ERROR_EVENT = re.compile(rb'(?:[0-9A-Fa-f]+\r\n)?data: \{"error":')
_ERROR_START: Final = b'data: {"error":'
_SIZE_LINE = re.compile(rb"[0-9A-Fa-f]{1,15}(?:\r\n?)?")
_USAGE = re.compile(rb'"usage":\s*\{[^{}]*?"completion_tokens":\s*(\d+)')


def post(path: str, netloc: bytes, id_: str, length: int, more: bytes = b"") -> bytes:
    """The head of a request to a worker; ``more``: further header lines, each with its CRLF."""
    return _HEAD % (path.encode(), netloc, length, id_.encode(), more)


def prefill_body(fields: dict[str, Any], eldr_id: str, *, hand_off: bool) -> bytes:
    """The client's body for the prefill leg: one token, not streamed, the rest untouched.

    ``hand_off`` asks the transfer connector to keep the KV for a decode worker; without it the answer is final.
    A positive min_tokens becomes 1, which still forbids an end at the first token; more would be refused by vLLM.
    """
    body = fields.copy()
    for name in _DROPPED_ON_PREFILL:
        body.pop(name, None)
    body["max_tokens"] = 1
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    if body.get("min_tokens"):
        body["min_tokens"] = 1
    if hand_off:
        body[TRANSFER] = {**_REQUEST_HANDOFF, "eldr_id": eldr_id}
    else:
        body.pop(TRANSFER, None)
    return orjson.dumps(body)


def decode_parts(body: bytes, params: dict[str, Any], eldr_id: str = "") -> list[bytes | memoryview]:
    """The client's own bytes with the hand-off spliced in before the closing brace; large bodies are not copied.

    eldr_id: under which a hook on the decode worker is to send the experts of the generated tokens; empty: it is not to.
    """
    end = body.rindex(b"}")
    if eldr_id:
        params = {**params, "eldr_id": eldr_id}
    return [memoryview(body)[:end], b',"kv_transfer_params":' + orjson.dumps(params) + b"}"]


def release_body(params: dict[str, Any]) -> bytes:
    """A request that a decode server refuses for its model; see handoff.release."""
    return orjson.dumps({"model": "eldrd-release", "prompt": [0], "max_tokens": 1, TRANSFER: params})


def parsed(body: bytes, *, chat: bool) -> dict[str, Any]:
    """A prefill answer with one choice at least, each with its text (chat: message). Raises ValueError for anything else."""
    answer: dict[str, Any] = orjson.loads(body)
    try:
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        whole = (
            _is_count(usage.get("prompt_tokens"))
            and _is_count(usage.get("completion_tokens"))
            and _is_count(details.get("cached_tokens"))
            and len(answer["choices"]) > 0
        )
        for choice in answer["choices"]:
            whole = whole and isinstance(choice["message"], dict) if chat else whole and isinstance(choice["text"], str)
    except (AttributeError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError("not a prefill answer")
    return answer


def _is_count(value: object) -> bool:
    return value is None or type(value) is int


def transfer_params(answer: dict[str, Any]) -> dict[str, Any] | None:
    """The hand-off in a prefill answer, without the hook's acknowledgement; None where the KV is not held."""
    params = answer.get(TRANSFER)
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        return None
    return {k: v for k, v in params.items() if k != "eldr"} if "eldr" in params else params


def finished(answer: dict[str, Any]) -> bool:
    """Whether the first token already ended the answer (end of text, stop string), so that nothing is left to decode."""
    return answer["choices"][0].get("finish_reason") not in ("length", None)


def completion_tokens(tail: bytes) -> int | None:
    """completion_tokens of the usage object in the last bytes of an answer, None if it has none."""
    # The last object that says it, and it is the last of all but where an answer ends in something else.
    last = _USAGE.match(tail, max(tail.rfind(b'"usage"'), 0))
    if last is not None:
        return int(last[1])
    found = _USAGE.findall(tail)
    return int(found[-1]) if found else None


def failed_stream(start: bytes) -> bool:
    """Whether a stream's first event is an error, as when the decode server could not load the KV; ``start``: the first
    bytes of the body, chunked or not."""
    return _ERROR_EVENT.match(start) is not None


def start_is_known(start: bytes) -> bool:
    """Whether so much of a stream is here that ``failed_stream`` can tell, however it was cut."""
    size = _SIZE_LINE.match(start)
    if size is not None:
        # Cut in the size line, which is no start of an event.
        if size.end() == len(start):
            return False
        if size[0].endswith(b"\n"):
            start = start[size.end() :]
    return not _ERROR_START.startswith(start[: len(_ERROR_START)]) or len(start) >= len(_ERROR_START)


def error_of_stream(body: bytes) -> tuple[int, bytes]:
    """Status and error object of a stream that ``failed_stream``; body: all of it, transfer coding removed."""
    data = body.removeprefix(b"data: ").partition(b"\n")[0]
    try:
        code = orjson.loads(data)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return 502, data
    return (code if type(code) is int and 400 <= code <= 599 else 502), data


def early_stream(answer: dict[str, Any], *, chat: bool, include_usage: bool) -> bytes:
    """A finished prefill answer as the events a streaming client expects, [DONE] included."""
    base = {k: answer.get(k) for k in ("id", "created", "model")}
    base["object"] = "chat.completion.chunk" if chat else "text_completion"
    events: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        ending = {"finish_reason": choice.get("finish_reason"), "stop_reason": choice.get("stop_reason")}
        index, logprobs = choice.get("index", 0), choice.get("logprobs")
        if chat:
            message = choice["message"]
            delta = {k: v for k, v in message.items() if v is not None and k != "role"}
            if calls := delta.get("tool_calls"):
                # Streamed calls are told apart by their index, whole ones by their place.
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            first = {"role": message.get("role", "assistant"), "content": ""}
            events.append({"choices": [{"index": index, "delta": first, "logprobs": None, "finish_reason": None}]})
            events.append({"choices": [{"index": index, "delta": delta, "logprobs": logprobs, **ending}]})
        else:
            events.append({"choices": [{"index": index, "text": choice["text"], "logprobs": logprobs, **ending}]})
    if include_usage:
        events.append({"choices": [], "usage": answer.get("usage")})
    return b"".join(b"data: " + orjson.dumps({**base, **e}) + b"\n\n" for e in events) + b"data: [DONE]\n\n"
