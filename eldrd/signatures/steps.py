"""What hooks measured of the decode steps of their engines, by worker name. Holds no sockets and expects nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from eldrd.signatures import wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eldrd.signatures.geometry import Geometry
    from eldrd.telemetry.metrics import Metrics, Pair, Sample

# Names of workers that are kept, whatever hooks call themselves.
_WORKERS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Steps:
    """Totals since the hook started. active: distinct experts of a step, mean over MoE layers, summed over steps."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    active: float = 0.0
    missed: int = 0


class StepFigures:
    """The totals of every hook that counts decode steps. They are the hook's own: they start again when it does, as
    Prometheus's counters may."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._now: dict[str, _Steps] = {}
        self._before: dict[str, _Steps] = {}
        for name, text, of in (
            ("active_experts", "Distinct experts of a decode step as its hook counted them, mean a layer.", "active"),
            ("requests", "Requests of a decode step.", "requests"),
            ("tokens", "Tokens of a decode step, those of a prompt prefilled beside them included.", "tokens"),
        ):
            metrics.summary(f"eldrd_worker_step_{name}", text, ("worker",), partial(self._pairs, of))
        text = "Decode steps that the hook could not count."
        metrics.counter("eldrd_worker_steps_missed", text, ("worker",), self._missed)

    def take(self, worker: str, geometry: Geometry, header: wire.Steps) -> None:
        """A hook's totals. Raises WireError for those that no steps can have."""
        layers, experts = geometry.shape
        least, most = header.steps * layers * geometry.top_k, header.steps * layers * experts
        if not (least <= header.active <= most and 0 <= header.steps <= header.requests <= header.tokens):
            raise wire.WireError(f"{header.active} active experts in {header.steps} steps of {header.tokens} tokens")
        if header.missed < 0:
            raise wire.WireError(f"{header.missed} steps missed")
        now = _Steps(header.steps, header.requests, header.tokens, header.active / layers, header.missed)
        last = self._now.pop(worker, _Steps())
        self._before[worker] = last if last.steps <= now.steps else _Steps()
        self._now[worker] = now
        if len(self._now) > _WORKERS:
            oldest = next(iter(self._now))
            del self._now[oldest], self._before[oldest]

    def status(self, worker: str) -> dict[str, Any] | None:
        """Totals, and the means a step over the last message's steps, about a second of them; None if there are none."""
        now = self._now.get(worker)
        if now is None:
            return None
        before = self._before[worker]
        steps = now.steps - before.steps
        means = {name: getattr(now, name) - getattr(before, name) for name in ("requests", "tokens", "active")}
        last = {name: round(value / steps, 3) if steps else None for name, value in means.items()}
        return {
            "count": now.steps,
            "missed": now.missed,
            "last_requests": last["requests"],
            "last_tokens": last["tokens"],
            "last_active_experts": last["active"],
        }

    def _known(self) -> Iterable[tuple[str, _Steps]]:
        """Those of configured workers: a hook may call itself anything, and a label may not."""
        workers = self._metrics.workers
        return [(name, s) for name, s in self._now.items() if workers is None or name in workers]

    def _pairs(self, of: str) -> Iterable[Pair]:
        return [((name,), s.steps, float(getattr(s, of))) for name, s in self._known()]

    def _missed(self) -> Iterable[Sample]:
        return [((name,), float(s.missed)) for name, s in self._known()]
