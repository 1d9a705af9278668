"""The fleet in virtual time: arrivals, prefill, the policy's decision, continuous batching. Draws nothing at random itself.

A worker's batch stays the same between two events, so its steps take the same expected time and are skipped at once:

    step = base + expert * A + request * n,        A = sum over l, e of (1 - product over its requests of (1 - p[l, e])) / L

A is the exact expectation of the distinct experts of a step (by linearity; requests draw their tokens independently).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from eldrd.routing.policy import Policy
    from loadgen.simulate.population import Population, Shape

    Renewed = Callable[[float, NDArray[np.int32]], Policy | None]

PREFILL_MS = 45.0
PREFILL_TOKEN_MS = 0.1


class Change(NamedTuple):
    """A decode worker that leaves (its requests are lost) or comes back, empty."""

    at: float
    worker: int
    kind: Literal["leave", "join"]


@dataclass(frozen=True, slots=True)
class Trace:
    """R requests in order of arrival. at: float64 [R], seconds; row: int64 [R], which of the population; output:
    int64 [R], tokens; measured: bool [R], whether its latency counts."""

    at: NDArray[np.float64]
    row: NDArray[np.int64]
    output: NDArray[np.int64]
    measured: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. tpot_ms: of the measured requests that ended whole; lost: requests on workers that left; active, batch:
    means over decode steps of the measured time; requests: on each worker; reasons: of the decisions."""

    tpot_ms: NDArray[np.float64]
    lost: int
    active: float
    batch: float
    requests: NDArray[np.int64]
    reasons: dict[str, int] = field(default_factory=dict)


class _Worker:
    """progress: steps since the start of time; ends: heap of (progress at its last token, request)."""

    __slots__ = ("active", "ends", "epoch", "progress", "since", "step_s")

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []
        self.progress = self.since = self.active = 0.0
        self.step_s = 1.0
        self.epoch = 0


class Fleet:
    """Decode workers that take requests of one population, routed by one policy."""

    def __init__(self, population: Population, workers: int, policy: Policy, slowness: Sequence[float] = ()) -> None:
        """slowness: factors on each worker's step time, 1 for all by default."""
        self._population = population
        self._shape: Shape = population.shape
        self._policy = policy
        self._slowness = tuple(slowness) or (1.0,) * workers
        self._workers = [_Worker() for _ in range(workers)]
        self._in_flight = np.zeros(workers, np.int32)
        self._usable = np.ones(workers, np.bool_)
        width = population.free.shape[1]
        self._free = np.ones((workers, width))
        ranks = self._shape.ranks
        self._segment = width if ranks == 1 else self._shape.experts // ranks
        self._admissions: dict[int, tuple[float, object]] = {}
        self._steps = self._step_experts = self._step_requests = 0.0

    def run(
        self, trace: Trace, prefill: int, changes: Sequence[Change] = (), renewed: Renewed = lambda *_: None
    ) -> Outcome:
        """Serve a trace to its end, behind so many prefill workers. renewed: given the time and the counts of each
        request before its decision, may answer with the policy that decides from now on; it must know what the one
        before admitted."""
        population, policy = self._population, self._policy
        ready = prefilled(trace, population, prefill)
        order = np.argsort(ready, kind="stable")
        shifts = sorted(changes)
        window = trace.at[trace.measured]
        begin, end = (float(window[0]), float(window[-1])) if len(window) else (0.0, 0.0)
        ends: list[tuple[float, int, int]] = []
        tpot = np.full(len(trace.at), np.nan)
        requests = np.zeros(len(self._workers), np.int64)
        reasons: dict[str, int] = {}
        lost = next_ = 0
        while next_ < len(order) or ends:
            arrives = ready[order[next_]] if next_ < len(order) else np.inf
            finishes = ends[0][0] if ends else np.inf
            if shifts and shifts[0].at <= min(arrives, finishes):
                change = shifts.pop(0)
                lost += self._change(change, begin, end)
                continue
            if finishes < arrives:
                now, w, epoch = heapq.heappop(ends)
                worker = self._workers[w]
                if epoch != worker.epoch:
                    continue
                self._advance(w, now, begin, end)
                _, request = heapq.heappop(worker.ends)
                begun, admission = self._admissions.pop(request)
                tpot[request] = (now - begun) / trace.output[request] * 1e3
                self._in_flight[w] -= 1
                policy.ended(admission, now, tpot[request] / 1e3)
                self._batch(w, population.free[trace.row[request]], joins=False)
            else:
                request = int(order[next_])
                next_ += 1
                now, row = float(arrives), int(trace.row[request])
                counts, tokens = population.counts[row], int(population.tokens[row])
                label = str(population.domains[row])
                policy = self._policy = renewed(now, counts) or policy
                wanted = counts if policy.wants_signature else None
                decision = policy.choose(self._in_flight, self._usable, wanted, tokens, label)
                w = decision.worker
                reasons[decision.reason] = reasons.get(decision.reason, 0) + 1
                requests[w] += 1
                self._admissions[request] = now, policy.admitted(w, wanted, tokens, now)
                self._advance(w, now, begin, end)
                worker = self._workers[w]
                heapq.heappush(worker.ends, (worker.progress + float(trace.output[request]), request))
                self._in_flight[w] += 1
                self._batch(w, population.free[row], joins=True)
            worker.epoch += 1
            if worker.ends:
                due = now + (worker.ends[0][0] - worker.progress) * worker.step_s
                heapq.heappush(ends, (due, w, worker.epoch))
        steps = max(self._steps, 1e-9)
        return Outcome(
            tpot_ms=tpot[trace.measured & np.isfinite(tpot)],
            lost=lost,
            active=self._step_experts / steps,
            batch=self._step_requests / steps,
            requests=requests,
            reasons=reasons,
        )

    def _advance(self, w: int, now: float, begin: float, end: float) -> None:
        """Let the steps up to now pass, and count those of the measured time."""
        worker = self._workers[w]
        if worker.ends:
            worker.progress += (now - worker.since) / worker.step_s
            inside = max(0.0, min(now, end) - max(worker.since, begin)) / worker.step_s
            self._steps += inside
            self._step_experts += inside * worker.active
            self._step_requests += inside * int(self._in_flight[w])
        worker.since = now

    def _batch(self, w: int, free: NDArray[np.float32], *, joins: bool) -> None:
        """The worker's batch has changed by a request: its new step time."""
        worker, shape = self._workers[w], self._shape
        worker.active = float(_changed(self._free[w], free, joins, self._segment, shape.ranks)) / shape.layers
        step_ms = shape.base_ms + shape.expert_ms * worker.active + shape.request_ms * int(self._in_flight[w])
        worker.step_s = step_ms * self._slowness[w] / 1e3

    def _change(self, change: Change, begin: float, end: float) -> int:
        """Take a worker out or in; how many requests it lost."""
        w = change.worker
        self._usable[w] = change.kind == "join"
        if change.kind == "join":
            return 0
        worker = self._workers[w]
        self._advance(w, change.at, begin, end)
        for _, request in worker.ends:
            self._policy.ended(self._admissions.pop(request)[1], change.at)
        lost = len(worker.ends)
        worker.ends.clear()
        worker.epoch += 1
        self._in_flight[w] = 0
        self._free[w] = 1.0
        return lost


def prefilled(trace: Trace, population: Population, workers: int) -> NDArray[np.float64]:
    """When each request's prefill is done, float64 [R]: the first free of so many workers takes the next in order."""
    free = [0.0] * workers
    done = np.empty(len(trace.at))
    cost = (PREFILL_MS + PREFILL_TOKEN_MS * population.tokens[trace.row]) / 1e3
    for i, at in enumerate(trace.at):
        done[i] = max(float(at), heapq.heappop(free)) + cost[i]
        heapq.heappush(free, done[i])
    return done


@njit(cache=True, nogil=True, fastmath=True)
def _changed(batch: Any, free: Any, joins: Any, segment: Any, ranks: Any) -> Any:
    """Take a request's factors into (or out of) a batch's; the expected active experts, of the most loaded rank in each
    layer. float64 keeps the quotients of hundreds of factors from 0.02 on."""
    total = 0.0
    for first in range(0, batch.size, segment * ranks):
        most = 0.0
        for rank in range(ranks):
            start = first + rank * segment
            mine, theirs = batch[start : start + segment], free[start : start + segment]
            active = 0.0
            if joins:
                for d in range(mine.size):
                    mine[d] *= theirs[d]
                    active += 1 - mine[d]
            else:
                for d in range(mine.size):
                    mine[d] = min(mine[d] / theirs[d], 1.0)
                    active += 1 - mine[d]
            most = max(most, active)
        total += most
    return total
