"""The experiments: which scenarios, which policies, on which populations and partitions. Prints and draws nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eldrd.routing.build import WITH_PARTITION, Options, build
from eldrd.signatures.capture import load_capture
from loadgen.simulate import ABLATIONS
from loadgen.simulate.engine import Change, Fleet
from loadgen.simulate.fits import STANDARD, TRANSFORMS, partition, transformed
from loadgen.simulate.population import drifted, joined, population, replayed
from loadgen.simulate.renewal import Renewal
from loadgen.simulate.scenario import (
    MEASURED_S,
    MIXES,
    QWEN,
    QWEN_235B,
    SHAPES,
    TASK,
    WARM_UP_S,
    Scenario,
    calibration,
    labels,
    trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition
    from eldrd.routing.policy import Policy
    from eldrd.signatures.capture import Capture
    from loadgen.simulate.population import Mix, Population, Shape

REQUESTS: Final = 3000
CALIBRATION: Final = 640
LOAD_POLICIES: Final = ("random", "round_robin", "jsq", "p2c")
RATES: Final = (20.0, 40.0, 60.0, 80.0, 100.0)
# Half the workers of the other models, each some two thirds as fast.
RATES_235B: Final = (6.0, 12.0, 18.0, 24.0, 30.0)
_LEFT, _BACK = WARM_UP_S + MEASURED_S / 3, WARM_UP_S + MEASURED_S * 2 / 3


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy under a name for tables; options as the daemon's, ``labels`` are filled in. partition: which of the
    fits it is given; refit: whether that follows the traffic."""

    label: str
    policy: str
    tau: float = 0.1
    options: Options = field(default_factory=Options)
    partition: str = "balanced"
    refit: bool = False


# All four only where the paper's main result is repeated: elsewhere the best is one of these two, and time is short.
BASELINES: Final = tuple(Contender(name, name) for name in ("round_robin", "jsq"))
ELDR: Final = Contender("eldr", "eldr")
UNION: Final = Contender("union", "union")
GUARDED: Final = Contender("guarded_band", "guarded_band")
SOFT: Final = Contender("soft_band", "soft_band")
REFITS: Final = (Contender("eldr refit", "eldr", refit=True), Contender("soft refit", "soft_band", refit=True))
EVERY: Final = (
    *(Contender(name, name) for name in LOAD_POLICIES),
    Contender("domain", "domain"),
    ELDR,
    Contender("eldr 2nd", "eldr", options=Options(second_nearest=True)),
    UNION,
    GUARDED,
    SOFT,
)
SHORT: Final = (*BASELINES, ELDR, UNION, GUARDED, SOFT)


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario and who is compared in it. variant: its row in the cell's table; transform: of the
    counts, for fit and policy."""

    cell: str
    variant: str
    scenario: Scenario
    contenders: tuple[Contender, ...] = SHORT
    transform: str = STANDARD


@dataclass(frozen=True, slots=True)
class Unit:
    """All jobs on one population: what a process works on. capture: requests of a capture instead of synthetic ones;
    the shape then gives the step's cost only."""

    shape: Shape
    mix: Mix
    seed: int
    jobs: tuple[Job, ...]
    capture: Path | None = None


def _rates(shape: Shape) -> tuple[float, ...]:
    return RATES_235B if shape is QWEN_235B else RATES


def _main(shape: Shape) -> Iterator[Job]:
    for rate in _rates(shape):
        scenario = Scenario(rate, prefill=2, decode=8) if shape is QWEN_235B else Scenario(rate)
        yield Job("main", f"{rate:g}/s", scenario, EVERY)


def _tau() -> Iterator[Job]:
    sweep = tuple(Contender(f"eldr {t:g}", "eldr", t) for t in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0))
    for rate in (20.0, 60.0, 100.0):
        yield Job("tau", f"{rate:g}/s", Scenario(rate), (*BASELINES, *sweep))


def _guard() -> Iterator[Job]:
    hard = tuple(
        Contender(f"guarded {g:g} {t:g}", "guarded_band", options=Options(guard=g, guarded_tau=t))
        for g, t in ((0.05, 0.2), (0.1, 0.1), (0.1, 0.2), (0.2, 0.2), (0.1, 0.4))
    )
    soft = tuple(
        Contender(f"soft {g:g} {p:g}", "soft_band", options=Options(soft_guard=g, pull=p))
        for g, p in ((0.2, 4.0), (0.4, 2.0), (0.4, 4.0), (0.4, 8.0), (1.0, 4.0))
    )
    for rate in (20.0, 60.0, 100.0):
        yield Job("guard", f"{rate:g}/s", Scenario(rate), (*BASELINES, ELDR, UNION, *hard, *soft))
    yield Job("guard", "drift 60/s", Scenario(60.0, drift=1.0), (*BASELINES, ELDR, UNION, *hard, *soft))


def _kmeans() -> Iterator[Job]:
    plain = Contender("eldr plain", "eldr", partition="plain")
    for rate in (20.0, 60.0, 100.0):
        yield Job("kmeans", f"{rate:g}/s", Scenario(rate), (*BASELINES, ELDR, plain))


def _transforms() -> Iterator[Job]:
    for name in TRANSFORMS:
        yield Job("transforms", name, Scenario(60.0), (*BASELINES, ELDR), transform=name)


def _pool() -> Iterator[Job]:
    for decode in (8, 16, 24):
        # The load of a worker is the same in all, and prefill is never short.
        scenario = Scenario(3.75 * decode, prefill=decode, decode=decode)
        yield Job("pool", f"{decode} decode", scenario)


def _drift() -> Iterator[Job]:
    for rate in (20.0, 60.0):
        for share in (0.0, 0.5, 1.0):
            yield Job("drift", f"{share:.0%} at {rate:g}/s", Scenario(rate, drift=share), (*SHORT, *REFITS))


def _elastic() -> Iterator[Job]:
    lost = tuple(Change(at, w, kind) for w in (3, 9) for at, kind in ((_LEFT, "leave"), (_BACK, "join")))  # type: ignore[arg-type]
    new = tuple(Change(at, w, kind) for w in (3, 9) for at, kind in ((0.0, "leave"), (_BACK, "join")))  # type: ignore[arg-type]
    yield Job("elastic", "2 of 16 lost", Scenario(60.0, changes=lost))
    yield Job("elastic", "2 join 14", Scenario(60.0, changes=new))
    yield Job(
        "elastic", "2 slower by half", Scenario(60.0, slowness=tuple(1.5 if w in (3, 9) else 1 for w in range(16)))
    )


def _traffic() -> Iterator[Job]:
    for rate in (20.0, 60.0):
        yield Job("traffic", f"skew {rate:g}/s", Scenario(rate, skew=6.0))
        yield Job("traffic", f"bursts {rate:g}/s", Scenario(rate, bursts=True))
        yield Job("traffic", f"lengths {rate:g}/s", Scenario(rate, lengths="mixed"))


_JOBS: Final = {
    "tau": _tau,
    "guard": _guard,
    "kmeans": _kmeans,
    "transforms": _transforms,
    "pool": _pool,
    "drift": _drift,
    "elastic": _elastic,
    "traffic": _traffic,
}


def plan(cells: str, seeds: int) -> list[Unit]:
    """The units of a choice of cells."""
    if cells == "quick":
        shape = replace(QWEN, name="qwen3-30b, 12 layers", layers=12)
        jobs = (
            *(Job("main", f"{r:g}/s", Scenario(r), SHORT) for r in (20.0, 60.0, 100.0)),
            Job("drift", "100% at 60/s", Scenario(60.0, drift=1.0)),
        )
        return [Unit(shape, mix, seed, jobs) for mix in MIXES for seed in range(min(seeds, 2))]
    out = []
    names = [c for c in ABLATIONS if c == cells or (cells == "paper" and c != "guard")]
    extra = tuple(job for name in names for job in _JOBS[name]())
    for shape in sorted(SHAPES, key=lambda s: s is QWEN) if cells in ("paper", "main") else (QWEN,):
        for mix in MIXES:
            jobs = tuple(_main(shape)) if cells in ("paper", "main") else ()
            jobs += extra if shape is QWEN else ()
            out += [Unit(shape, mix, seed, jobs) for seed in range(seeds)]
    return out[::-1]


def replay(capture: Path, shape: Shape, seeds: int) -> list[Unit]:
    """The main cell on the requests of a capture."""
    jobs = tuple(_main(shape))
    return [Unit(shape, replace(TASK, name=capture.name), seed, jobs, capture) for seed in range(seeds)]


def run(unit: Unit) -> list[dict[str, Any]]:
    """Every job of a unit by every contender: a JSON-ready row each, and one of the calibration."""
    home, sample, captured = _requests(unit)
    found = calibration(home, unit.seed)
    common = {"model": home.shape.name, "workload": unit.mix.name, "seed": unit.seed}
    rows: list[dict[str, Any]] = [{**common, "cell": "calibration", **asdict(found)}]
    partitions: dict[tuple[int, str, str], Partition] = {}
    others: dict[float, Population] = {0.0: home}
    for job in unit.jobs:
        scenario = job.scenario
        if scenario.drift not in others:
            new = population(unit.shape, drifted(unit.mix), REQUESTS, unit.seed)
            others[scenario.drift] = joined(home, new, scenario.drift, unit.seed)
        traffic = transformed(others[scenario.drift], job.transform)
        workers = [f"d{i}" for i in range(scenario.decode)]
        arrivals = trace(scenario, traffic, unit.seed)
        homes = labels(sample, workers)
        for contender in job.contenders:
            key = scenario.decode, contender.partition, job.transform
            fitted = None
            if contender.policy in WITH_PARTITION:
                if key not in partitions:
                    partitions[key] = partition(captured, sample, workers, *key[1:], unit.seed)
                fitted = partitions[key]
            policy_of = partial(
                build,
                contender.policy,
                workers=workers,
                tau=contender.tau,
                seed=unit.seed,
                options=replace(contender.options, labels=homes, ranks=home.shape.ranks),
            )
            policy = policy_of(partition=fitted)
            fleet = Fleet(traffic, scenario.decode, policy, scenario.slowness)
            follow: dict[str, Any] = {}
            if contender.refit and fitted:
                follow["renewed"] = Renewal(fitted, policy, partial(_after, policy_of))
            outcome = fleet.run(arrivals, scenario.prefill, scenario.changes, **follow)
            p50, p95, p99 = np.percentile(outcome.tpot_ms, (50, 95, 99)).tolist()
            rows.append(
                {
                    **common,
                    "cell": job.cell,
                    "variant": job.variant,
                    "policy": contender.label,
                    "tpot_p50_ms": p50,
                    "tpot_p95_ms": p95,
                    "tpot_p99_ms": p99,
                    "active_experts": outcome.active,
                    "batch": outcome.batch,
                    "measured": len(outcome.tpot_ms),
                    "lost": outcome.lost,
                    "imbalance": float(outcome.requests.max() / outcome.requests.mean()),
                    "reasons": outcome.reasons,
                    "rho": fitted.rho if fitted else None,
                }
            )
    return rows


def _after(policy_of: Callable[..., Policy], fitted: Partition, before: Policy) -> Policy:
    return policy_of(partition=fitted, before=before)


def _requests(unit: Unit) -> tuple[Population, Population, Capture]:
    """(requests that arrive, others that the partition is fitted to, the latter as a capture)."""
    if unit.capture is None:
        home = population(unit.shape, unit.mix, REQUESTS, unit.seed)
        sample = population(unit.shape, unit.mix, CALIBRATION, unit.seed + 1000)
        return home, sample, sample.capture(np.random.default_rng(unit.seed))
    whole = load_capture(unit.capture)
    layers, experts = whole.geometry.shape
    shape = replace(unit.shape, name=whole.geometry.model, layers=layers, experts=experts, top_k=whole.geometry.top_k)
    order = np.random.default_rng(unit.seed).permutation(len(whole.labels))
    first, second = (_some(whole, rows) for rows in np.array_split(order, 2))
    return replayed(first, shape), replayed(second, shape), second


def _some(capture: Capture, rows: NDArray[np.int64]) -> Capture:
    return replace(
        capture,
        prefill=capture.prefill[rows],
        prompt_tokens=capture.prompt_tokens[rows],
        output_tokens=capture.output_tokens[rows],
        labels=[capture.labels[row] for row in rows],
        decode=None if capture.decode is None else capture.decode[rows],
    )
