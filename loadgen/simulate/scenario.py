"""Named models, workloads and traces of the simulator, and their calibration. Runs no fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from loadgen.simulate.engine import Change, Trace
from loadgen.simulate.population import Mix, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.simulate.population import Population

QWEN: Final = Shape("qwen3-30b", 48, 128, 8, base_ms=8.0, expert_ms=0.155, request_ms=0.02)
GPT_OSS: Final = Shape("gpt-oss-120b", 36, 128, 4, base_ms=8.0, expert_ms=0.14, request_ms=0.03)
GEMMA: Final = Shape("gemma-like", 30, 128, 8, base_ms=7.0, expert_ms=0.12, request_ms=0.03)
QWEN_235B: Final = Shape("qwen3-235b-ep4", 94, 128, 8, base_ms=18.0, expert_ms=0.5, request_ms=0.05, ranks=4)
SHAPES: Final = (QWEN, GPT_OSS, GEMMA, QWEN_235B)

TASK: Final = Mix(
    "task", (1.41, 1.2, 1.1, 1.0), 6, general=1.0, domain=1.9, topic=0.5, request=1.0, decode=0.5, common=0.1
)
LANGUAGE: Final = Mix(
    "language",
    (45, 30, 6, 5, 4, 4, 3, 3),
    6,
    general=1.0,
    domain=1.0,
    topic=1.2,
    request=1.0,
    decode=0.5,
    common=0.15,
)
MIXES: Final = (TASK, LANGUAGE)

WARM_UP_S: Final = 20.0
MEASURED_S: Final = 60.0
TAIL_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Traffic and fleet. rate: requests a second; output: tokens of every answer, or of the mean one where ``lengths``
    is mixed (lognormal, sigma 0.8); bursts: for 4 of every 16 seconds the rate is 2.2 times the mean; skew: the first
    domain's weight is this many times its own; drift: share of requests from domains the fit has not seen; changes:
    workers that leave or join, at shares of the measured time."""

    rate: float
    prefill: int = 8
    decode: int = 16
    output: int = 512
    lengths: Literal["fixed", "mixed"] = "fixed"
    bursts: bool = False
    skew: float = 1.0
    drift: float = 0.0
    changes: tuple[Change, ...] = ()
    slowness: tuple[float, ...] = ()


def trace(scenario: Scenario, population: Population, seed: int) -> Trace:
    """Poisson arrivals that draw evenly from the population; the same arguments give the same trace."""
    rng = np.random.default_rng((seed, 4))
    seconds = WARM_UP_S + MEASURED_S + TAIL_S
    peak = scenario.rate * (2.2 if scenario.bursts else 1.0)
    at = np.sort(rng.random(rng.poisson(peak * seconds)) * seconds)
    if scenario.bursts:
        # Thinned outside the bursts, so that the mean rate stays what it is called.
        at = at[(at % 16 < 4) | (rng.random(len(at)) < (16 - 4 * 2.2) / 12 / 2.2)]
    weights = np.where(population.domains == 0, scenario.skew, 1.0)
    row = rng.choice(len(population), len(at), p=weights / weights.sum())
    output = np.full(len(at), scenario.output, np.int64)
    if scenario.lengths == "mixed":
        drawn = rng.lognormal(np.log(scenario.output) - 0.8**2 / 2, 0.8, len(at))
        output = np.clip(drawn, 16, 8 * scenario.output).astype(np.int64)
    measured = (at >= WARM_UP_S) & (at < WARM_UP_S + MEASURED_S)
    return Trace(at, row, output, measured)


def labels(population: Population, workers: list[str]) -> dict[str, list[str]]:
    """Workers of each domain for the policy ``domain``, in proportion to its share of requests, at least one each."""
    share = np.bincount(population.domains) / len(population) * len(workers)
    counts = np.maximum(1, np.floor(share).astype(int))
    while counts.sum() < len(workers):
        counts[np.argmax(share - counts)] += 1
    while counts.sum() > len(workers) and counts.max() > 1:
        counts[np.argmax(np.where(counts > 1, counts - share, -np.inf))] -= 1
    first = np.concatenate([[0], np.cumsum(counts)])
    return {str(d): [workers[i % len(workers)] for i in range(first[d], first[d + 1])] for d in range(len(counts))}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a population shows of the paper's statistics. saving: by batch size, how many fewer experts a batch of one
    domain activates than a mixed one; correlation: mean over experts of the correlation, over requests, of the shares
    of prompt and of 512 decode tokens that select it."""

    saving: dict[int, float]
    correlation: float


def calibration(population: Population, seed: int = 0, draws: int = 40) -> Calibration:
    """Measured on batches drawn at random and on sampled decode counts."""
    rng = np.random.default_rng((seed, 5))
    n, shape = len(population), population.shape
    log = np.log(population.free.astype(np.float64))

    def active(rows: NDArray[np.int64]) -> float:
        return float((1 - np.exp(log[rows].sum(axis=0))).sum() / shape.layers)

    present = np.unique(population.domains)
    saving = {}
    for batch in (16, 32, 64):
        mixed = np.mean([active(rng.choice(n, batch)) for _ in range(draws)])
        alike = [
            active(rng.choice(np.flatnonzero(population.domains == rng.choice(present)), batch)) for _ in range(draws)
        ]
        saving[batch] = float(1 - np.mean(alike) / mixed)
    before = (population.counts / population.tokens[:, None, None]).reshape(n, -1)
    after = rng.binomial(512, 1 - population.free) / 512
    used = after.mean(axis=0) > 0.01
    x, y = (v[:, used] - v[:, used].mean(axis=0) for v in (before, after))
    scale = np.sqrt((x * x).sum(axis=0) * (y * y).sum(axis=0))
    correlation = np.divide((x * y).sum(axis=0), scale, out=np.zeros_like(scale), where=scale > 0)
    return Calibration(saving, float(correlation.mean()))
