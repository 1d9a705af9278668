"""Prometheus metrics: every name, label and bucket, once. Label values come from the configuration or from constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_TPOT = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5)
_SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

_M = TypeVar("_M", bound=MetricWrapperBase)
Sample = tuple[tuple[str, ...], float]


class _Live:
    """Gauges read from live state when scraped, so that keeping them costs a request nothing."""

    def __init__(self) -> None:
        self.sources: list[tuple[str, str, tuple[str, ...], Callable[[], Iterable[Sample]]]] = []

    def collect(self) -> Iterable[Metric]:
        for name, text, labels, read in self.sources:
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, number in read():
                family.add_metric(list(values), number)
            yield family


class _Labelled(Generic[_M]):
    """A metric whose children are found by one lookup: prometheus_client checks the label values on every call."""

    def __init__(self, metric: _M) -> None:
        self._metric = metric
        self._children: dict[tuple[str | int, ...], _M] = {}

    def labels(self, *values: str | int) -> _M:
        try:
            return self._children[values]
        except KeyError:
            child = self._children[values] = self._metric.labels(*values)
            return child

    def keep(self, position: int, allowed: frozenset[str]) -> None:
        """Drop the children whose label at ``position`` is none of these."""
        for values in [v for v in self._children if v[position] not in allowed]:
            del self._children[values]
            self._metric.remove(*values)


class Metrics:
    """One registry with all of eldrd's metrics; ``live`` adds gauges that are read when scraped. workers: names of the
    configured workers; series of others are dropped."""

    def __init__(self) -> None:
        self.workers: frozenset[str] | None = None
        self.registry = r = CollectorRegistry()
        self._live = _Live()
        r.register(self._live)
        self.requests = _Labelled(
            Counter("eldrd_requests", "Requests ended.", ("endpoint", "status", "outcome"), registry=r)
        )
        self.routed = _Labelled(
            Counter("eldrd_routed", "Requests sent to a worker.", ("role", "worker", "reason"), registry=r)
        )
        self.retries = _Labelled(Counter("eldrd_retries", "Legs tried again.", ("role", "cause"), registry=r))
        self.handoffs = _Labelled(Counter("eldrd_handoffs", "Hand-offs ended.", ("outcome",), registry=r))
        self.signatures = _Labelled(
            Counter("eldrd_signatures", "Signatures at decision: exact, partial, missing, off.", ("state",), registry=r)
        )
        self.frames = Counter("eldrd_signature_frames", "Frames from hooks.", ("kind",), registry=r)
        self.kv_events = Counter("eldrd_kv_events", "Blocks in the KV cache events of vLLM.", ("kind",), registry=r)
        self.reloads = Counter("eldrd_reloads", "Reloads of the configuration.", ("outcome",), registry=r)
        self.captured = Counter("eldrd_captured", "Signatures offered to the capture.", ("outcome",), registry=r)
        self.refits = Counter("eldrd_refits", "Online refits of the partition.", ("outcome",), registry=r)
        self.refit_objective = Gauge(
            "eldrd_refit_objective", "Mean cosine to the own centroid at the refit.", registry=r
        )
        self.refit_moved = Gauge("eldrd_refit_moved_share", "Requests that the refit moved to others.", registry=r)
        self.refit_seconds = Histogram("eldrd_refit_seconds", "Time a refit takes.", buckets=_TTFT, registry=r)
        self.ttft = Histogram("eldrd_ttft_seconds", "Request to first content.", buckets=_TTFT, registry=r)
        self.prefill = Histogram("eldrd_prefill_seconds", "Prefill request to its answer.", buckets=_TTFT, registry=r)
        self.signature_wait = Histogram(
            "eldrd_signature_wait_seconds",
            "Wait for a signature after the prefill's answer.",
            buckets=_SHORT,
            registry=r,
        )
        self.tpot = _Labelled(
            Histogram(
                "eldrd_tpot_seconds",
                "Mean gap between the tokens (or events) of a stream.",
                ("worker",),
                buckets=_TPOT,
                registry=r,
            )
        )
        self.output_tokens = Counter("eldrd_output_tokens", "Tokens (or events) streamed.", registry=r)
        self.generation = Gauge("eldrd_config_generation", "Configurations loaded since the start.", registry=r)

    def live(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        self._live.sources.append((name, text, labels, read))

    def exposition(self) -> bytes:
        if self.workers is not None:
            # At a scrape, not at the reload: a removed worker's last requests count until they end.
            self.routed.keep(1, self.workers)
            self.tpot.keep(0, self.workers)
        return generate_latest(self.registry)
