"""What an emulated worker answers: vLLM's JSON and SSE shapes. Decides nothing.

Shapes are those of vLLM 0.32 (entrypoints/openai/*/protocol.py and serving.py, which leaves unset fields out of
chunks). A stream's chunk is a %-format of a template made once a request: a worker writes thousands a second.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadgen.fleet.protocol import Call
    from loadgen.fleet.sequence import Sequence

DONE = b"data: [DONE]\n\n"


def _event(obj: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(obj) + b"\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """The event with which a stream that has begun tells of an error."""
    return _event(body)


class Answer:
    """Renders one call's answer. sequences: prompt-major, n a prompt."""

    def __init__(
        self, call: Call, answer_id: str, model: str, sequences: list[Sequence], prompt_texts: list[str]
    ) -> None:
        self._call, self._id, self._sequences, self._prompt_texts = call, answer_id, sequences, prompt_texts
        kind = "chat.completion" if call.chat else "text_completion"
        self._base = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
        chunk = dict(self._base, object="chat.completion.chunk") if call.chat else self._base
        # Cut the object open at its end so that choices can be appended; % in a name would be taken for a format.
        self._open = b"data: " + orjson.dumps(chunk)[:-1].replace(b"%", b"%%") + b',"choices":['
        plain = b'{"index":%d,"delta":{"content":%s},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        text = (
            b'{"index":%d,"text":%s,"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
            b'"token_ids":null}]}\n\n'
        )
        self._template = self._open + (plain if call.chat else text)
        self._chunk = chunk

    def start(self) -> bytes:
        """What a stream sends before its first token: chat's role chunks."""
        if not self._call.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            _event(
                {
                    **self._chunk,
                    "choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}],
                    "prompt_token_ids": s.prompt.tolist() if self._call.return_token_ids else None,
                }
            )
            for i, s in enumerate(self._sequences)
        )

    def chunks(self, index: int, first: int, upto: int) -> Iterator[bytes]:
        """The events of output tokens ``first`` to ``upto`` of one sequence, one a token."""
        seq = self._sequences[index]
        out = seq.output
        rich = self._call.return_token_ids or self._call.continuous_usage
        for i in range(first, upto):
            text = self._echo(index) + out.pieces[i] if i == 0 else out.pieces[i]
            if rich or i + 1 == len(out.tokens):
                yield _event(self._rich_chunk(index, i, text))
            else:
                yield self._template % (index, orjson.dumps(text))

    def usage_event(self) -> bytes:
        """The last event of a stream with stream_options.include_usage."""
        return _event({**self._chunk, "choices": [], "usage": self._usage()})

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [self._choice(i, s) for i, s in enumerate(self._sequences)]
        body: dict[str, Any] = {
            **self._base,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self._usage(),
            # vLLM has room for one hand-off only, the first prompt's.
            "kv_transfer_params": self._sequences[0].hand_off,
        }
        if self._call.chat:
            body["prompt_logprobs"] = None
            body["prompt_token_ids"] = self._sequences[0].prompt.tolist() if self._call.return_token_ids else None
        return orjson.dumps(body)

    def _echo(self, index: int) -> str:
        return self._prompt_texts[index // self._call.n] if self._call.echo and not self._call.chat else ""

    def _choice(self, index: int, seq: Sequence) -> dict[str, Any]:
        ids = self._call.return_token_ids
        out = seq.output
        text = self._echo(index) + "".join(out.pieces)
        end = {"logprobs": None, "finish_reason": out.finish_reason, "stop_reason": out.stop_reason}
        tokens = out.tokens if ids else None
        if self._call.chat:
            message = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
            return {"index": index, "message": message, **end, "token_ids": tokens}
        prompt = seq.prompt.tolist() if ids else None
        return {
            "index": index,
            "text": text,
            **end,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt,
            "token_ids": tokens,
        }

    def _rich_chunk(self, index: int, i: int, text: str) -> dict[str, Any]:
        seq = self._sequences[index]
        last = i + 1 == len(seq.output.tokens)
        ids = self._call.return_token_ids
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": text}} if self._call.chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": seq.output.finish_reason if last else None}
        if last or not self._call.chat:
            choice["stop_reason"] = seq.output.stop_reason if last else None
        if not self._call.chat:
            choice["prompt_token_ids"] = seq.prompt.tolist() if ids and i == 0 else None
        choice["token_ids"] = [seq.output.tokens[i]] if ids else None
        chunk = {**self._chunk, "choices": [choice]}
        if self._call.continuous_usage:
            n = len(seq.prompt)
            chunk["usage"] = {"prompt_tokens": n, "total_tokens": n + i + 1, "completion_tokens": i + 1}
        return chunk

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(p) for p in self._call.prompts)
        completion = sum(s.produced for s in self._sequences)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self._sequences[-1].cached_tokens},
        }
