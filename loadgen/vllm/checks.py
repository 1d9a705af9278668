"""What is held against the truth on real vLLM: outputs against a plain server, signatures against the model's routers."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from eldrd.signatures.capture import load_capture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import openai
    from numpy.typing import NDArray

    from loadgen.vllm.stack import Stack
    from loadgen.vllm.truth import Truth

LENGTHS = (1, 31, 32, 33, 300, 3000)
_OUTPUT = 16
# The widest gap of two log probabilities that float32 rounding may close.
_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Output:
    """One prompt through eldrd and through a plain server, by one API. equal: the same token ids, near ties apart."""

    length: int
    chat: bool
    stream: bool
    equal: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """One request's captured signature. moved: token choices that differ; near_tie: all of them near ties of the gate;
    gap: the narrowest top-k gap of the prompt, in logits."""

    label: str
    exact: bool
    moved: int
    near_tie: bool
    gap: float


def prompt(stack: Stack, length: int, seed: int, domain: int | None = None) -> list[int]:
    """Random token ids of one domain, or of any."""
    spec = stack.spec.model
    ids = np.array([t for d in range(spec.domains) for t in spec.domain_tokens(d) if domain in (None, d)])
    picked: NDArray[Any] = np.random.default_rng((seed, length)).choice(ids, length)
    return [int(t) for t in picked]


def text(stack: Stack, length: int, seed: int) -> str:
    """Words of about ``length`` tokens, for chat."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stack.checkpoint)
    return str(tokenizer.decode(prompt(stack, length, seed)))


@dataclass(frozen=True, slots=True)
class Expected:
    """A plain server's greedy answer. gaps: of each token, how far its log probability is above the next best one's."""

    ids: list[int]
    gaps: list[float]

    def allows(self, ids: Sequence[int]) -> bool:
        """Whether these ids are the answer: the same, or as many and the same up to a token that float rounding may swap
        for another, as what else is in a batch decides in which order a server adds up."""
        if len(ids) != len(self.ids):
            return False
        apart = next((at for at, (a, b) in enumerate(zip(self.ids, ids, strict=True)) if a != b), None)
        return apart is None or self.gaps[apart] < _TIE


async def expect(
    client: openai.AsyncOpenAI, model: str, content: list[int] | str, *, chat: bool = False, tokens: int = _OUTPUT
) -> Expected:
    """What a server that does it all by itself answers."""
    create: Any
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    if chat:
        create = client.chat.completions.create
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": tokens}
        ask |= {"logprobs": True, "top_logprobs": 2}
    else:
        create = client.completions.create
        ask = {"prompt": content, "max_tokens": tokens, "logprobs": 2}
    choice = (await create(model=model, temperature=0, extra_body=more, **ask)).choices[0]
    best = (
        [[top.logprob for top in token.top_logprobs] for token in choice.logprobs.content]
        if chat
        else [list(token.values()) for token in choice.logprobs.top_logprobs]
    )
    gaps = []
    for probabilities in best:
        first, second, *_ = sorted(probabilities, reverse=True)
        gaps.append(first - second)
    return Expected(list(choice.token_ids), gaps)


async def generate(
    client: openai.AsyncOpenAI, model: str, content: list[int] | str, *, chat: bool, stream: bool, tokens: int = _OUTPUT
) -> list[int]:
    """Greedy token ids by one of the four ways to ask."""
    create: Any
    if chat:
        create = client.chat.completions.create
        ask: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": tokens}
    else:
        create = client.completions.create
        ask = {"prompt": content, "max_tokens": tokens}
    answer = await create(
        model=model, temperature=0, stream=stream, extra_body={"return_token_ids": True, "ignore_eos": True}, **ask
    )
    if not stream:
        return list(answer.choices[0].token_ids)
    ids: list[int] = []
    async for event in answer:
        for choice in event.choices:
            ids += getattr(choice, "token_ids", None) or []
    return ids


async def outputs(stack: Stack, lengths: Sequence[int] = LENGTHS) -> list[Output]:
    """Every length by completions and chat, streamed and not, through eldrd and through the plain server."""
    found = []
    async with stack.client(stack.eldrd.url) as through, stack.client(stack.plain_url) as plain:
        for length in lengths:
            for chat in (False, True):
                content = text(stack, length, 1) if chat else prompt(stack, length, 1)
                expected = await expect(plain, stack.model, content, chat=chat)
                for stream in (False, True):
                    got = await generate(through, stack.model, content, chat=chat, stream=stream)
                    found.append(Output(length, chat, stream, expected.allows(got) and got != [], len(got)))
    return found


async def captured(stack: Stack, prompts: Mapping[str, str | list[int]], parallel: int, folder: Path) -> None:
    """Send labelled prompts through eldrd while it captures their signatures to ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    await stack.eldrd.reload(capture={"dir": str(folder)})
    room = asyncio.Semaphore(parallel)

    async def one(session: aiohttp.ClientSession, label: str, ids: str | list[int]) -> None:
        body = {"model": stack.model, "prompt": ids, "max_tokens": 4, "ignore_eos": True}
        headers = {"X-Eldrd-Label": label}
        async with room, session.post(stack.eldrd.url + "/v1/completions", json=body, headers=headers) as r:
            answer = await r.text()
            if r.status != 200:
                raise RuntimeError(f"{label}: {r.status} {answer}")

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session, label, ids) for label, ids in prompts.items()))
    # The reload writes out what is held.
    await stack.eldrd.reload(capture={"dir": ""})


async def signatures(stack: Stack, truth: Truth) -> list[SignatureCheck]:
    """Cold, after prefix hits, chunked, with shared prefixes, and several at once: captured counts against the truth."""
    lengths = (1, 31, 32, 33, 64, 300, 3000)
    cold = {f"cold-{n}": prompt(stack, n, 2) for n in lengths}
    long = cold["cold-3000"]
    again = {f"again-{n}": cold[f"cold-{n}"] for n in lengths}
    shared = {
        "shared-100": cold["cold-300"][:100] + prompt(stack, 50, 3),
        "shared-chunked": long[:640] + prompt(stack, 2400, 4),
    }
    together = {f"together-{i}": prompt(stack, 20 + 37 * i, 5) for i in range(12)}
    together |= {"together-hit": cold["cold-300"], "together-long": prompt(stack, 2900, 6)}
    checks = []
    for parallel, prompts in ((1, {**cold, **again, **shared}), (len(together), together)):
        folder = stack.out / "capture-check"
        await captured(stack, prompts, parallel, folder)
        capture = load_capture(folder)
        found = {str(label): counts for label, counts in zip(capture.labels, capture.prefill, strict=True)}
        for label, ids in prompts.items():
            if label not in found:
                checks.append(SignatureCheck(label, exact=False, moved=-1, near_tie=False, gap=0.0))
                continue
            routing = await asyncio.to_thread(truth.routing, ids)
            comparison = routing.compare(found[label])
            checks.append(
                SignatureCheck(label, comparison.exact, comparison.moved, comparison.near_tie, round(routing.gap, 7))
            )
    return checks


def purity(domains: Sequence[int], workers: Sequence[str]) -> float:
    """Share of the requests that went to the worker which most requests of their domain went to."""
    by_domain: dict[int, Counter[str]] = {}
    for domain, worker in zip(domains, workers, strict=True):
        by_domain.setdefault(domain, Counter())[worker] += 1
    return sum(c.most_common(1)[0][1] for c in by_domain.values()) / len(domains)
