"""Workloads: seeded requests of several domains and their arrival times. No HTTP.

The default resembles the ELDR paper's task workload: domains of about equal weight, several topics in each, prompts of
50-400 tokens. A tenth of the prompts mix two domains, so that not every request has an obvious home.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.vocabulary import COMMON, vocabulary

DOMAINS = ("code", "math", "medical", "legal")


@dataclass(frozen=True, slots=True)
class Workload:
    """What requests look like. weights: of the domains; own, common, domain: shares of a prompt's words that come from
    its topic, from the words all domains use and from its domain's other topics (the rest from anywhere);
    two_domains: share of requests that mix two; prompt and output lengths are lognormal, in tokens, with clips. The
    vocabulary fields must be the model's."""

    weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    own: float = 0.65
    common: float = 0.2
    domain: float = 0.12
    two_domains: float = 0.1
    prompt_median: float = 180.0
    prompt_sigma: float = 0.5
    prompt_clip: tuple[int, int] = (50, 400)
    output_median: float = 110.0
    output_sigma: float = 0.35
    output_clip: tuple[int, int] = (40, 240)
    vocab: int = 8192
    topics: int = 6
    vocab_common: float = 0.2


@dataclass(frozen=True, slots=True)
class Request:
    """at: seconds after the trace's begin; domain: index into the weights; prompt: text, or token ids for a model with a
    tokenizer of its own; output_tokens: how many to ask for."""

    at: float
    domain: int
    prompt: str | list[int]
    output_tokens: int


def requests(workload: Workload, n: int, seed: int) -> list[Request]:
    """n requests at time 0."""
    return _make(workload, np.zeros(n), np.random.default_rng(seed))


def poisson(workload: Workload, rate: float, seconds: float, seed: int) -> list[Request]:
    """Requests of a Poisson process of ``rate`` a second over ``seconds``."""
    rng = np.random.default_rng(seed)
    n = rng.poisson(rate * seconds)
    return _make(workload, np.sort(rng.random(n) * seconds), rng)


def _make(w: Workload, times: np.ndarray, rng: np.random.Generator) -> list[Request]:
    words = vocabulary(w.vocab, len(w.weights), w.topics, w.vocab_common)
    weights = np.array(w.weights) / sum(w.weights)
    out = []
    for at in times:
        domain = int(rng.choice(len(weights), p=weights))
        topics = [(domain, int(rng.integers(w.topics)))]
        if rng.random() < w.two_domains and len(weights) > 1:
            other = (domain + int(rng.integers(1, len(weights)))) % len(weights)
            topics.append((other, int(rng.integers(w.topics))))
        mix = np.full(words.groups, (1 - w.own - w.common - w.domain) / (words.groups - 1))
        mix[COMMON] = w.common
        for d, t in topics:
            mix[words.group(d, t)] += w.own / len(topics)
            mix[words.group(d, 0) : words.group(d, 0) + w.topics] += w.domain / w.topics / len(topics)
        n = _length(rng, w.prompt_median, w.prompt_sigma, w.prompt_clip)
        output = _length(rng, w.output_median, w.output_sigma, w.output_clip)
        out.append(Request(float(at), domain, words.decode(words.draw(mix, n, rng).tolist()), output))
    return out


def _length(rng: np.random.Generator, median: float, sigma: float, clip: tuple[int, int]) -> int:
    return int(np.clip(rng.lognormal(np.log(median), sigma), *clip))
