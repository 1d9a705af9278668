"""What an emulated worker accepts: vLLM's OpenAI bodies, checked as vLLM checks them. No answers are written here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.fleet.model import EmulatedMoE


class ApiError(Exception):
    """An HTTP error with vLLM's error object (entrypoints/serve/engine/protocol.py ErrorInfo)."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(msgspec.Struct):
    """Fields that both paths share; unknown ones are ignored, as in vLLM."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    echo: bool | None = False
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Completion(_Body):
    prompt: str | list[Any] | None = None
    max_tokens: int | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None


class _Chat(_Body):
    messages: list[_Message] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request. prompts: token ids, int32 [n] each; max_tokens: per prompt what is left of the context."""

    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompts: list[NDArray[np.int32]]
    max_tokens: list[int]
    min_tokens: int
    ignore_eos: bool
    n: int
    seed: int
    stop: list[str]
    stop_token_ids: list[int]
    include_stop: bool
    echo: bool
    return_token_ids: bool
    cache_salt: str
    kv_transfer_params: dict[str, Any] | None


def parse(body: bytes, *, chat: bool, model: EmulatedMoE) -> Call:
    """The call in a request body. Raises ApiError 400 or 404 with the message vLLM gives."""
    try:
        fields = msgspec.json.decode(body, type=_Chat if chat else _Completion)
    except msgspec.DecodeError as e:
        raise ApiError(400, str(e), "Bad Request") from None
    if fields.model is not None and fields.model != model.spec.name:
        raise ApiError(404, f"The model `{fields.model}` does not exist.", "NotFoundError", "model")
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    if fields.n is not None and fields.n < 1:
        raise ApiError(400, f"n must be at least 1, got {fields.n}.", param="n")
    options = fields.stream_options or StreamOptions()
    if isinstance(fields, _Chat):
        prompts = [_chat_prompt(fields, model)]
        asked = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    else:
        prompts = _prompts(fields.prompt, model)
        asked = fields.max_tokens if fields.max_tokens is not None else 16
    limits = [_max_tokens(len(p), asked, model.spec.max_model_len) for p in prompts]
    if not 0 <= fields.min_tokens <= min(limits):
        raise ApiError(
            400, f"min_tokens must be less than or equal to max_tokens={min(limits)}, got {fields.min_tokens}."
        )
    return Call(
        chat=chat,
        stream=bool(fields.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        prompts=prompts,
        max_tokens=limits,
        min_tokens=fields.min_tokens,
        ignore_eos=fields.ignore_eos,
        n=fields.n or 1,
        seed=fields.seed or 0,
        stop=[s for s in ([fields.stop] if isinstance(fields.stop, str) else fields.stop or []) if s],
        stop_token_ids=fields.stop_token_ids or [],
        include_stop=fields.include_stop_str_in_output,
        echo=bool(fields.echo),
        return_token_ids=bool(fields.return_token_ids),
        cache_salt=fields.cache_salt or "",
        kv_transfer_params=fields.kv_transfer_params,
    )


class _HandOff(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def hand_off_of(body: bytes) -> dict[str, Any] | None:
    """The kv_transfer_params of a body that may be no valid request; None where there are none."""
    try:
        return msgspec.json.decode(body, type=_HandOff).kv_transfer_params
    except msgspec.DecodeError:
        return None


def _max_tokens(prompt: int, asked: int | None, context: int) -> int:
    room = context - prompt
    if room < 1 or (asked is not None and asked > room):
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested {asked or 0} output "
            f"tokens and your prompt contains {prompt} input tokens. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if asked is not None and asked < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {asked}.", param="max_tokens")
    return room if asked is None else asked


def _prompts(prompt: str | list[Any] | None, model: EmulatedMoE) -> list[NDArray[np.int32]]:
    if not prompt:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, str) or all(isinstance(t, int) for t in prompt):
        prompt = [prompt]
    return [_tokens(p, model) for p in prompt]


def _tokens(prompt: object, model: EmulatedMoE) -> NDArray[np.int32]:
    ids: list[Any] | None = model.vocabulary.encode(prompt) if isinstance(prompt, str) else None
    if isinstance(prompt, list) and all(isinstance(t, int) and 0 <= t < model.spec.vocab for t in prompt):
        ids = prompt
    if not ids:
        raise ApiError(400, "Input should be a valid string or a list of token ids of the vocabulary", param="prompt")
    return np.array(ids, np.int32)


def _chat_prompt(fields: _Chat, model: EmulatedMoE) -> NDArray[np.int32]:
    if not fields.messages:
        raise ApiError(400, "messages: Field required", "Bad Request", "messages")
    parts = []
    for m in fields.messages:
        content = m.content or ""
        if isinstance(content, list):
            content = " ".join(str(c.get("text", "")) for c in content if isinstance(c, dict))
        parts.append(f"<{m.role}> {content}")
    return np.array(model.vocabulary.encode(" ".join([*parts, "<assistant>"])), np.int32)
