"""One generation on an emulated worker: its prompt, its predetermined output and how far it is. No scheduling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadgen.vocabulary import EOS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence as Seq

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.fleet.model import EmulatedMoE
    from loadgen.fleet.protocol import Call
    from loadgen.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Output:
    """What a request will answer: tokens, the text each adds, why it ends (``length`` or ``stop``) and on what."""

    tokens: list[int]
    pieces: list[str]
    finish_reason: str
    stop_reason: str | int | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request. request_id: the engine's unique id; produced: output tokens done so far; changed: set when
    ``produced`` or ``error`` changed; params: the kv_transfer_params it came with; hand_off: those it answers."""

    request_id: str
    prompt: NDArray[np.int32]
    hashes: list[int]
    output: Output
    changed: asyncio.Event
    params: dict[str, Any] | None = None
    hand_off: dict[str, Any] | None = None
    blocks: list[int] = field(default_factory=list)
    produced: int = 0
    cached_tokens: int = 0
    error: str | None = None
    aborted: bool = False

    @property
    def done(self) -> bool:
        return self.error is not None or self.produced >= len(self.output.tokens)

    @property
    def next_input(self) -> int:
        """The token that the next decode step runs through the model."""
        return self.output.tokens[self.produced - 1] if self.produced else int(self.prompt[-1])

    def advance(self) -> None:
        self.produced += 1
        self.changed.set()

    def fail(self, message: str) -> None:
        self.error = message
        self.changed.set()

    def blocks_needed(self, block_size: int) -> int:
        """KV blocks of the prompt and the output; the last output token is never run through the model."""
        return -(-(len(self.prompt) + len(self.output.tokens) - 1) // block_size)


def plan_output(
    tokens: list[int],
    words: Vocabulary,
    *,
    max_tokens: int,
    stop: Seq[str] = (),
    stop_token_ids: Seq[int] = (),
    include_stop: bool = False,
) -> Output:
    """Cut a continuation at the first stop string or stop token, and split its text over the tokens.

    As vLLM does (v1/engine/detokenizer.py), text that could still become a stop string is held back until it is clear,
    and a stop string is left out of the text unless ``include_stop``.
    """
    pieces = [f" {w}" if (w := words.words[t]) else "" for t in tokens]
    hold = max((len(s) for s in stop), default=1) - 1 if not include_stop else 0
    text, sent = "", 0
    out: list[str] = []
    for i, (token, piece) in enumerate(zip(tokens, pieces, strict=True)):
        searched, text = len(text), text + piece
        if token in stop_token_ids:
            return Output(tokens[: i + 1], [*out, text[sent:]], "stop", token)
        for s in stop:
            if (at := text.find(s, max(0, searched - len(s) + 1))) >= 0:
                end = at + len(s) if include_stop else at
                return Output(tokens[: i + 1], [*out, text[sent:end]], "stop", s)
        last = i + 1 == len(tokens)
        upto = len(text) if last else max(sent, len(text) - hold)
        out.append(text[sent:upto])
        sent = upto
    reason = "length" if len(tokens) >= max_tokens and tokens[-1] != EOS else "stop"
    return Output(tokens, out, reason, None)


def outputs(call: Call, model: EmulatedMoE) -> list[Output]:
    """What a call will be answered, prompt-major with n a prompt: the same on every worker and in every process."""
    planned = []
    for prompt, limit in zip(call.prompts, call.max_tokens, strict=True):
        for i in range(call.n):
            tokens = model.continue_prompt(prompt, limit, call.min_tokens, call.ignore_eos, call.seed + i)
            planned.append(
                plan_output(
                    tokens,
                    model.vocabulary,
                    max_tokens=limit,
                    stop=call.stop,
                    stop_token_ids=call.stop_token_ids,
                    include_stop=call.include_stop,
                )
            )
    return planned
