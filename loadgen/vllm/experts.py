"""Active experts of decode steps: what the hooks measured in a run beside what was to be expected. Sends no request.

Two expectations stand beside the hooks' measure, both eldrd's own (``eldrd.routing.batches``) and both means over steps:
one replays where and when the run's requests decoded, from their prompts' signatures, under any policy; the other is the
daemon's live gauge, where the policy has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from eldrd.routing.batches import Batches, Running
from eldrd.signatures.capture import load_capture
from loadgen.vllm import checks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from numpy.typing import NDArray

    from loadgen.client import Result
    from loadgen.vllm.stack import Stack
    from loadgen.workloads import Request

SETTLE_S = 1.4
"""Hooks tell of their steps once a second."""
_EXPECTED = "eldrd_expected_active_experts"
_SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class Steps:
    """Means over the decode steps of a run, of all workers together. requests, tokens: of a step; active: experts that the
    hooks counted, mean a layer; expected: the daemon's gauge at these steps, nan without one; missed: steps that were not
    counted."""

    steps: float
    requests: float
    tokens: float
    active: float
    expected: float
    missed: float


class Window:
    """The daemon's gauge, weighted by the steps that were made while it stood: steps come once a second, in one go."""

    def __init__(self) -> None:
        self._made: dict[str, float] = {}
        self._seen: defaultdict[str, list[float]] = defaultdict(list)
        self._sum = self._steps = 0.0

    def add(self, made: dict[str, float], expected: dict[str, float]) -> None:
        """One look at the metrics: steps made and active experts expected, by worker."""
        for worker, value in expected.items():
            if value > 0:
                self._seen[worker].append(value)
        for worker, steps in made.items():
            more = steps - self._made.get(worker, steps)
            self._made[worker] = steps
            seen = self._seen.pop(worker, []) if more else []
            if seen:
                self._sum += more * float(np.mean(seen))
                self._steps += more

    @property
    def mean(self) -> float:
        return self._sum / self._steps if self._steps else math.nan


class Watch:
    """Watches a run's decode steps: ``async with Watch(stack) as watch: ...``, then ``watch.result``. Nothing may decode
    before and after."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._window = Window()
        self._before: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self.result = Steps(0, math.nan, math.nan, math.nan, math.nan, 0)

    async def __aenter__(self) -> Self:
        self._before = await self._look()
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        if kind is None:
            await asyncio.sleep(SETTLE_S)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if kind is None:
            after = await self._look()
            total = {name: after.get(name, 0.0) - self._before.get(name, 0.0) for name in after}
            steps = total.get("steps", 0.0)
            requests, tokens, active = (
                total[name] / steps if steps else math.nan for name in ("requests", "tokens", "active_experts")
            )
            self.result = Steps(steps, requests, tokens, active, self._window.mean, total.get("missed", 0.0))

    async def _sample(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_SAMPLE_S)

    async def _look(self) -> dict[str, float]:
        """Totals over all decode workers now; each look is also a sample of the gauge."""
        made: dict[str, float] = {}
        expected: dict[str, float] = {}
        totals = dict.fromkeys(("steps", "requests", "tokens", "active_experts", "missed"), 0.0)
        for family in text_string_to_metric_families(await self._stack.eldrd.get("/metrics")):
            for sample in family.samples:
                if sample.name == _EXPECTED:
                    expected[sample.labels["worker"]] = sample.value
                elif sample.name == "eldrd_worker_step_active_experts_count":
                    made[sample.labels["worker"]] = sample.value
                    totals["steps"] += sample.value
                elif sample.name == "eldrd_worker_steps_missed_total":
                    totals["missed"] += sample.value
                elif sample.name.startswith("eldrd_worker_step_") and sample.name.endswith("_sum"):
                    totals[sample.name.removeprefix("eldrd_worker_step_").removesuffix("_sum")] += sample.value
        self._window.add(made, expected)
        return totals


async def signatures(stack: Stack, trace: Sequence[Request], folder: Path) -> NDArray[np.int32]:
    """Expert counts int32 [requests, L, E] of a trace's prompts, as eldrd captures them. A run may follow at once."""
    await checks.captured(stack, {str(i): r.prompt for i, r in enumerate(trace)}, 4, folder)
    capture = await asyncio.to_thread(load_capture, folder)
    await asyncio.sleep(SETTLE_S)
    rows = {label: i for i, label in enumerate(capture.labels)}
    return capture.prefill[[rows[str(i)] for i in range(len(trace))]]


def expected(results: Sequence[Result], counts: NDArray[np.int32], top_k: int) -> float:
    """Active experts of a step, mean a layer, that the signatures of what ran on each worker let one expect.

    results: of a run, in the order of counts [requests, L, E]. A worker's steps take as long as its requests' TPOT says,
    mean over those that run; a request runs from its first token to its last.
    """
    batches = Batches()
    workers = sorted({r.worker for r in results})
    batches.reserve(range(len(workers)))
    tokens = counts[:, 0].sum(axis=1) // top_k
    # A daemon knows the mean request long before a run begins.
    for c, n in zip(counts, tokens.tolist(), strict=True):
        batches.end(batches.admit(0, c, n, 0.0), 0.0)
    changes: list[tuple[float, bool, int]] = []
    for i, r in enumerate(results):
        if r.ok and r.tokens > 1:
            first = r.at + r.late + r.ttft
            changes += [(first, True, i), (first + r.tpot * (r.tokens - 1), False, i)]
    running: list[dict[int, tuple[Running, float]]] = [{} for _ in workers]
    steps = total = last = 0.0
    for now, starts, i in sorted(changes):
        for slot, there in enumerate(running):
            if there:
                made = (now - last) / float(np.mean([tpot for _, tpot in there.values()]))
                steps += made
                total += made * float(batches.active[slot])
        last = now
        slot = workers.index(results[i].worker)
        if starts:
            running[slot][i] = batches.admit(slot, counts[i], int(tokens[i]), now), results[i].tpot
        else:
            batches.end(running[slot].pop(i)[0], now)
    return total / steps if steps else math.nan


def summary(rounds: Sequence[Steps], predicted: Sequence[float]) -> dict[str, Any]:
    """Medians over rounds, for a policy's entry of the report; None for what there is none of."""

    def median(values: list[float]) -> float | None:
        known = [v for v in values if math.isfinite(v)]
        return round(float(np.median(known)), 2) if known else None

    return {
        "active_experts": median([r.active for r in rounds]),
        "active_experts_predicted": median(list(predicted)),
        "active_experts_expected_live": median([r.expected for r in rounds]),
        "step_requests": median([r.requests for r in rounds]),
        "step_tokens": median([r.tokens for r in rounds]),
        "steps": round(sum(r.steps for r in rounds)),
        "steps_missed": round(sum(r.missed for r in rounds)),
    }
