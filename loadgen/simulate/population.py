"""Synthetic requests: what their prompts selected and how their decode tokens will select experts. No time, no workers.

The logit of expert e in layer l for a request is a sum of normal parts: one common to all (generalist experts), one of
the request's domain, one of its topic, one of its own, and for decode one more of its own that the prompt did not show.
A token takes the top-k of logits + Gumbel noise, so expert e is among them with a probability close to

    pi(z)[e] = 1 - exp(-theta * exp(z[e])),    theta such that the pi of a layer sum to k

(the top-k of a Gumbel race are the clocks that ring before a time theta, which hardly varies). A share of the tokens are
words that all domains use, which select by the common part alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from eldrd.signatures.capture import Capture
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

P_MAX = 0.98


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's MoE layers and what a decode step costs: base + expert * (active, mean a layer) + request * n, ms. ranks:
    expert-parallel ranks of consecutive experts; active experts are then those of the most loaded rank."""

    name: str
    layers: int
    experts: int
    top_k: int
    base_ms: float
    expert_ms: float
    request_ms: float
    ranks: int = 1

    @property
    def geometry(self) -> Geometry:
        """As a hook would announce it."""
        return Geometry(self.name, 1, tuple(range(self.layers)), self.experts, self.top_k, 16)


@dataclass(frozen=True, slots=True)
class Mix:
    """Statistics of a workload. weights: of the domains; topics: of each; general, domain, topic, request, decode:
    standard deviations of the logits' parts; common: share of tokens of all domains' words; prompt tokens are
    lognormal. seed: fixes the experts' parts, so that two mixes of one seed have equal domains."""

    name: str
    weights: tuple[float, ...]
    topics: int
    general: float
    domain: float
    topic: float
    request: float
    decode: float
    common: float
    prompt_median: float = 180.0
    prompt_sigma: float = 0.6
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Population:
    """N requests to draw traffic from. counts: int32 [N, L, E] of the prompts; free: float32 [N, L * E], the chance that
    a decode token does not select the expert; tokens: int64 [N], prompt tokens; domains: int64 [N]."""

    shape: Shape
    counts: NDArray[np.int32]
    free: NDArray[np.float32]
    tokens: NDArray[np.int64]
    domains: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def capture(self, rng: np.random.Generator, output_tokens: int = 512) -> Capture:
        """The same requests as a capture with decode counts, for the fit."""
        p = 1 - self.free.reshape(self.counts.shape)
        return Capture(
            geometry=self.shape.geometry,
            prefill=self.counts,
            prompt_tokens=self.tokens.astype(np.int32),
            output_tokens=np.full(len(self), output_tokens, np.int32),
            labels=[str(d) for d in self.domains],
            decode=rng.binomial(output_tokens, p).astype(np.int32),
        )


def population(shape: Shape, mix: Mix, n: int, seed: int) -> Population:
    """n requests of a mix on a model; the same arguments give the same requests."""
    general, groups = _parts(shape, mix)
    rng = np.random.default_rng((seed, 1))
    weights = np.array(mix.weights) / sum(mix.weights)
    domains = rng.choice(len(weights), n, p=weights)
    topics = rng.integers(mix.topics, size=n)
    tokens = np.clip(rng.lognormal(np.log(mix.prompt_median), mix.prompt_sigma, n), 16, 4096).astype(np.int64)
    everyone = _selected(general[None], shape.top_k)[0]
    counts = np.empty((n, *general.shape), np.int32)
    free = np.empty((n, general.size), np.float32)
    for i in range(n):  # one at a time: three float arrays of all requests would not fit beside those kept
        z = groups[domains[i], topics[i]] + _normal(rng, mix.request, general.shape)
        later = z + _normal(rng, mix.decode, general.shape)
        now, then = (1 - mix.common) * _selected(np.stack([z, later]), shape.top_k) + mix.common * everyone
        counts[i] = rng.binomial(tokens[i], np.minimum(now, 1.0))
        free[i] = 1 - np.minimum(then, P_MAX).ravel()
    return Population(shape, counts, free, tokens, domains)


def drifted(mix: Mix) -> Mix:
    """The same statistics with other domains and topics."""
    return replace(mix, seed=mix.seed + 1)


def joined(first: Population, second: Population, share: float, seed: int) -> Population:
    """As many requests as ``first`` has, ``share`` of them from ``second``."""
    rng = np.random.default_rng((seed, 2))
    n = len(first)
    new = rng.random(n) < share
    rows = np.flatnonzero(new)
    take = rng.integers(len(second), size=len(rows))
    counts, free, tokens, domains = first.counts.copy(), first.free.copy(), first.tokens.copy(), first.domains.copy()
    counts[rows], free[rows], tokens[rows] = second.counts[take], second.free[take], second.tokens[take]
    domains[rows] = second.domains[take]
    return Population(first.shape, counts, free, tokens, domains)


def replayed(capture: Capture, shape: Shape) -> Population:
    """The requests of a capture; those without decode counts decode as they prefill. Raises ValueError for a capture
    of another shape."""
    if capture.geometry.shape != (shape.layers, shape.experts):
        raise ValueError(f"the capture has {capture.geometry.shape} layers x experts, the model {shape.name} others")
    seen = capture.prefill if capture.decode is None else capture.decode
    total = seen.sum(axis=2, keepdims=True) / shape.top_k
    prior = (seen / np.maximum(total, 1)).mean(axis=0)
    p = (seen + 8 * prior) / (total + 8)
    names = sorted({label or "" for label in capture.labels})
    return Population(
        shape,
        capture.prefill,
        (1 - np.minimum(p, P_MAX)).reshape(len(p), -1).astype(np.float32),
        capture.prompt_tokens.astype(np.int64),
        np.array([names.index(label or "") for label in capture.labels], np.int64),
    )


def _parts(shape: Shape, mix: Mix) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(common logits [L, E], logits of each domain and topic [domains, topics, L, E])."""
    layers = shape.layers, shape.experts
    general = _normal(np.random.default_rng((0, 0)), mix.general, layers)
    rng = np.random.default_rng((mix.seed, 3))
    domain = _normal(rng, mix.domain, (len(mix.weights), 1, *layers))
    topic = _normal(rng, mix.topic, (len(mix.weights), mix.topics, *layers))
    return general, general + domain + topic


def _normal(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _selected(z: NDArray[np.float32], top_k: int) -> NDArray[np.float32]:
    """pi of the module's docstring for logits [N, L, E]."""
    rows = np.ascontiguousarray(z.reshape(-1, z.shape[-1]))
    out = np.empty_like(rows)
    _solve(rows, float(top_k), out)
    return out.reshape(z.shape)


@njit(cache=True, nogil=True, fastmath=True)
def _solve(z: Any, k: Any, out: Any) -> None:
    """Newton's method for theta on each row, which converges from below: the sum is concave in theta."""
    experts = z.shape[1]
    w = np.empty(experts, np.float32)
    for i in range(z.shape[0]):
        row, to = z[i], out[i]
        top = row[0]
        for e in range(experts):
            top = max(top, row[e])
        total = np.float32(0)
        for e in range(experts):
            w[e] = np.exp(row[e] - top)
            total += w[e]
        theta = np.float32(k) / total
        for _ in range(50):
            chosen = np.float32(0)
            slope = np.float32(0)
            for e in range(experts):
                missed = np.exp(-theta * w[e])
                to[e] = np.float32(1) - missed
                chosen += to[e]
                slope += w[e] * missed
            short = np.float32(k) - chosen
            if short < np.float32(1e-4) * np.float32(k):
                break
            theta += short / slope
