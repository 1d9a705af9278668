"""A checked client request and the record of its way, as the lifecycle sees them. Parsing is api's, not done here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson

_PREFIX_BYTES: Final = 1024


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """id: unique inside the fleet, sent to workers as X-Request-Id and as eldr_id; client_id: the client's own
    X-Request-Id or ``id``, echoed; path: the worker's path; body: the client's bytes; fields: the same, parsed;
    prefix: leading bytes of the prompt, for the prefill choice; single_token: the answer is one token long; samples: n;
    prompts: the prompts where there are several; alias: the model's name in answers where it is not ``model``."""

    id: str
    client_id: str
    path: str
    chat: bool
    body: bytes
    fields: dict[str, Any]
    model: str
    stream: bool
    include_usage: bool
    single_token: bool
    prefix: bytes
    label: str | None
    passed_headers: bytes
    samples: int = 1
    prompts: tuple[Any, ...] | None = None
    alias: str | None = None

    @property
    def single(self) -> bool:
        """Whether a worker's answer can be the client's as it is."""
        return self.samples == 1 and self.prompts is None and self.alias is None


@dataclass(slots=True)
class Record:
    """What is known of one request's way; becomes its log line and its metrics. Times are of time.monotonic, since uvloop's
    clock counts whole milliseconds; 0.0: not reached."""

    arrived: float
    prefill: str = ""
    prefill_reason: str = ""
    decode: str = ""
    decode_reason: str = ""
    score: float = 0.0
    candidates: int = 0
    signature: str = "off"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    prefilled: float = 0.0
    decided: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    status: int = 0
    outcome: str = ""
    parts: int = 1
    retries: list[str] = field(default_factory=list)


def prefix_of(prompt: Any) -> bytes:
    """The first bytes of what the prompt says, equal for prompts that begin alike."""
    if isinstance(prompt, str):
        return prompt[:_PREFIX_BYTES].encode("utf-8", "replace")[:_PREFIX_BYTES]
    if prompt and isinstance(prompt[0], dict):
        parts: list[bytes] = []
        length = 0
        for message in prompt:
            content = message.get("content")
            text = (
                content if isinstance(content, str) else orjson.dumps(content)[:_PREFIX_BYTES].decode("utf-8", "ignore")
            )
            parts.append(f"{message.get('role')}\0{text[:_PREFIX_BYTES]}\0".encode("utf-8", "replace"))
            length += len(parts[-1])
            if length >= _PREFIX_BYTES:
                break
        return b"".join(parts)[:_PREFIX_BYTES]
    return orjson.dumps(prompt[: _PREFIX_BYTES // 2])[:_PREFIX_BYTES]
