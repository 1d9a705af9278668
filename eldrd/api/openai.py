"""The OpenAI paths and what a body may hold: bytes in, an immutable Request out, or a Failure. Sends nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import orjson

from eldrd.api.errors import bad_request, unknown_model
from eldrd.fleet.vllm import TRANSFER
from eldrd.handoff.request import Request, prefix_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
PATHS: Final = (COMPLETIONS, CHAT)
# orjson reads 1,024 levels but writes no more than 254, and the prefill body is written anew.
_MAX_DEPTH: Final = 200
_LABEL_BYTES: Final = 256
# Choices of one request, each with a hand-off of its own.
_MAX_PARTS: Final = 128
_PASSED_HEADERS: Final = ("traceparent", "tracestate")
# Fields that few requests have; those without any of them are spared the questions about each.
_RARE: Final = frozenset(
    (TRANSFER, "n", "seed", "best_of", "prompt_logprobs", "echo", "use_beam_search", "stream_options")
)
_IDS_AT_ONCE: Final = 256
_ids: Final[list[str]] = []
# A child would otherwise give its parent's ids.
os.register_at_fork(after_in_child=_ids.clear)


def parse(
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    models: Collection[str],
    aliases: Mapping[str, str] | None = None,
) -> Request:
    """Check a body as far as eldrd needs to understand it; the rest is the worker's to judge. Raises Failure.

    headers: looked up by lower-case names; models: names that may be asked for, empty if unknown; aliases: the worker's name
    behind further ones.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise bad_request("The body is not valid JSON.") from None
    if not isinstance(fields, dict):
        raise bad_request("The body must be a JSON object.")
    _not_too_deep(body, fields)
    chat = path == CHAT
    model = _model(fields, models, aliases)
    stream = _boolean(fields, "stream")
    rare = not _RARE.isdisjoint(fields)
    if rare and fields.get(TRANSFER) is not None:
        raise bad_request(f"{TRANSFER} is set by the router and cannot be given.", TRANSFER)
    prompt = _prompt(fields, chat=chat)
    samples = _samples(fields) if rare else 1
    prompts = _prompts(prompt, samples, chat=chat)
    include_usage = False
    if rare:
        _only_where_sound(fields)
        if TRANSFER in fields:
            del fields[TRANSFER]
            body = orjson.dumps(fields)
        include_usage = _include_usage(fields)
    limit = fields.get("max_tokens")
    if chat and fields.get("max_completion_tokens") is not None:
        limit = fields["max_completion_tokens"]
    alias = model if aliases and model in aliases else None
    id_ = _id()
    return Request(
        id=id_,
        client_id=_client_id(headers) or id_,
        path=path,
        chat=chat,
        body=body,
        fields=fields,
        model=aliases[model] if aliases and alias is not None else model,
        stream=stream,
        include_usage=include_usage,
        # vLLM's default for /v1/completions without max_tokens is more than one.
        single_token=limit == 1 and type(limit) is int,
        prefix=prefix_of(prompt),
        label=_label(headers),
        passed_headers=_passed(headers),
        samples=samples,
        prompts=prompts,
        alias=alias,
    )


def _id() -> str:
    """128 bits of the system's generator, as text; drawn for many requests by one system call, each given once."""
    if not _ids:
        drawn = os.urandom(16 * _IDS_AT_ONCE).hex()
        _ids.extend([drawn[i : i + 32] for i in range(0, len(drawn), 32)])
    return _ids.pop()


def _not_too_deep(body: bytes, fields: dict[str, Any]) -> None:
    for value in fields.values():
        if type(value) is list or type(value) is dict:
            break
    else:
        return
    # Each level takes two bytes.
    if len(body) <= 2 * _MAX_DEPTH or body.count(b"{") + body.count(b"[") <= _MAX_DEPTH:
        return
    level: list[Any] = [fields]
    for _ in range(_MAX_DEPTH):
        level = [v for c in level for v in (c.values() if type(c) is dict else c) if type(v) is dict or type(v) is list]
        if not level:
            return
    raise bad_request(f"The body is nested more than {_MAX_DEPTH} levels deep.")


def _model(fields: dict[str, Any], models: Collection[str], aliases: Mapping[str, str] | None) -> str:
    model = fields.get("model")
    if model is None:
        if len(models) == 1:
            return next(iter(models))
        raise bad_request("model is missing.", "model")
    if not isinstance(model, str):
        raise bad_request("model must be a string.", "model")
    if models and model not in models and not (aliases and model in aliases):
        raise unknown_model(model)
    return model


def _boolean(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false.", name)
    return value is True


def _include_usage(fields: dict[str, Any]) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object.", "stream_options")
    return options.get("include_usage") is True


def _prompt(fields: dict[str, Any], *, chat: bool) -> Any:
    name = "messages" if chat else "prompt"
    prompt = fields.get(name)
    if chat:
        if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) for m in prompt):
            raise bad_request("messages must be a list of at least one message object.", name)
    elif prompt is None or not isinstance(prompt, str | list) or not prompt:
        raise bad_request("prompt must be a text or a list of token ids, and not empty.", name)
    return prompt


def _samples(fields: dict[str, Any]) -> int:
    """n; best_of would have to generate what it then throws away, as vLLM does not any more."""
    n = fields.get("n")
    if n is None:
        n = 1
    if type(n) is not int or n < 1:
        raise bad_request("n must be a whole number of at least 1.", "n")
    seed = fields.get("seed")
    if type(seed) is int and not -(2**63) <= seed <= 2**63 - n:
        raise bad_request("seed must be a 64-bit number.", "seed")
    if fields.get("best_of") not in (None, n):
        raise bad_request("best_of other than n is not supported.", "best_of")
    return n


def _prompts(prompt: Any, samples: int, *, chat: bool) -> tuple[Any, ...] | None:
    """The prompts, where the request has several."""
    if samples == 1 and (chat or isinstance(prompt, str)):
        return None
    several = not chat and isinstance(prompt, list) and not isinstance(prompt[0], int) and len(prompt) > 1
    if several and not all(p and isinstance(p, str | list) for p in prompt):
        raise bad_request("Every prompt must be a text or a list of token ids, and not empty.", "prompt")
    if samples * (len(prompt) if several else 1) > _MAX_PARTS:
        raise bad_request(f"n times the number of prompts must not be more than {_MAX_PARTS}.", "n")
    return tuple(prompt) if several else None


def _only_where_sound(fields: dict[str, Any]) -> None:
    """D never computes the prompt, so it has no logprobs of it; and beams cannot leave the server they began on."""
    if fields.get("prompt_logprobs") is not None:
        raise bad_request("prompt_logprobs is not supported across prefill and decode workers.", "prompt_logprobs")
    if fields.get("echo") and fields.get("logprobs") is not None:
        raise bad_request("echo with logprobs is not supported across prefill and decode workers.", "echo")
    if fields.get("use_beam_search"):
        raise bad_request("Beam search is not supported across prefill and decode workers.", "use_beam_search")


def _client_id(headers: Mapping[str, str]) -> str | None:
    value = headers.get("x-request-id")
    if value is None or len(value) > 200 or not value.isprintable():
        return None
    return value


def _label(headers: Mapping[str, str]) -> str | None:
    value = headers.get("x-eldrd-label")
    if value is None or not value.isprintable() or len(value.encode()) > _LABEL_BYTES:
        return None
    return value


def _passed(headers: Mapping[str, str]) -> bytes:
    """Header lines that go on to the workers: the trace context, nothing else of the client's."""
    lines = ""
    for name in _PASSED_HEADERS:
        value = headers.get(name)
        if value is not None and value.isprintable():
            lines += f"{name}: {value}\r\n"
    return lines.encode("latin-1", "replace")
