"""What one request may still try: its retry budget, the workers that failed it, and whose breaker hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eldrd.handoff.failure import Failure, bad_gateway, no_worker, timed_out

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from eldrd.config import Health, Settings
    from eldrd.fleet.connection import UpstreamError
    from eldrd.fleet.table import Pool
    from eldrd.fleet.worker import Worker
    from eldrd.handoff.request import Record
    from eldrd.telemetry.metrics import Metrics

_REPEATABLE = ("refused", "reset", "timeout")


class Retries:
    """One request's further tries. A leg is tried again only if nothing of an answer had arrived."""

    __slots__ = ("_budget", "_health", "_metrics", "_record", "_tried")

    def __init__(self, settings: Settings, metrics: Metrics, record: Record) -> None:
        self._budget = settings.retries.attempts
        self._health = settings.health
        self._metrics = metrics
        self._record = record
        self._tried: tuple[Worker, ...] = ()

    def usable(self, pool: Pool) -> NDArray[np.bool_]:
        """bool [W]: the pool's usable workers that have not failed this request."""
        usable = pool.usable()
        if self._tried:
            for row, worker in enumerate(pool.workers):
                if worker in self._tried:
                    usable[row] = False
        return usable

    def failed(self, worker: Worker, e: UpstreamError) -> None:
        """Tell the breaker of a failed exchange. A stale connection is nobody's fault, a stalled client not D's."""
        if not e.stale and e.cause != "stalled":
            worker.failed(self._health.failures, self._health.open_s, unreachable=e.phase == "connect")
            self._tried += (worker,)

    def again(self, role: str, e: UpstreamError) -> None:
        """Spend one try, or raise what the client gets. A stale connection costs none: its successor is new."""
        if e.stale:
            self._count(role, "stale")
            return
        late = e.cause == "timeout" and e.phase != "connect"
        if e.answered or late or e.cause not in _REPEATABLE or self._budget == 0:
            raise final(role, e)
        self.spend(role, e.cause)

    def spend(self, role: str, cause: str) -> None:
        """Spend one try, or raise Failure if there is none left."""
        if self._budget == 0:
            raise bad_gateway(role, cause)
        self._budget -= 1
        self._count(role, cause)

    def _count(self, role: str, cause: str) -> None:
        self._record.retries.append(f"{role}_{cause}")
        self._metrics.retries.labels(role, cause).inc()


def answered(worker: Worker, status: int, health: Health) -> None:
    """Tell the breaker of an answer; a 4xx is the client's fault, not the worker's."""
    if status >= 500:
        worker.failed(health.failures, health.open_s, unreachable=False)
    else:
        worker.succeeded()


def final(role: str, e: UpstreamError) -> Failure:
    """The client's answer to a failed exchange that is not tried again."""
    if e.cause == "timeout":
        return timed_out(role, e.phase)
    if e.phase == "connect":
        return no_worker(role)
    return bad_gateway(role, e.cause)
