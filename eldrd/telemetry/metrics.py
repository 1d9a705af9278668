"""Prometheus metrics: every name, label and bucket, once. Label values come from the configuration or from constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import generate_latest

from eldrd.telemetry.series import Count, Distribution, Family, counters, histograms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_TPOT = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5)
_SHORT = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

Sample = tuple[tuple[str, ...], float]
Pair = tuple[tuple[str, ...], int, float]
"""Label values, count and sum of what a summary holds."""


class _Live:
    """Metrics read from live state when scraped, so that keeping them costs a request nothing."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], Metric]] = []

    def collect(self) -> Iterable[Metric]:
        return (read() for read in self.sources)


class Metrics:
    """One registry with all of eldrd's metrics; ``live``, ``counter`` and ``summary`` add some that are read when scraped.
    workers: names of the configured workers; series of others are dropped."""

    def __init__(self) -> None:
        self.workers: frozenset[str] | None = None
        self.registry = r = CollectorRegistry()
        self._live = _Live()
        r.register(self._live)

        def counter(name: str, text: str, *labels: str) -> Family[Count]:
            return counters(name, text, labels, r)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Distribution:
            return histograms(name, text, (), buckets, r).labels()

        self.requests = counter("eldrd_requests", "Requests ended.", "endpoint", "status", "outcome")
        self.routed = counter("eldrd_routed", "Requests sent to a worker.", "role", "worker", "reason")
        self.retries = counter("eldrd_retries", "Legs tried again.", "role", "cause")
        self.handoffs = counter("eldrd_handoffs", "Hand-offs ended.", "outcome")
        text = "Signatures at decision: exact, partial, missing, off."
        self.signatures = counter("eldrd_signatures", text, "state")
        self.frames = counter("eldrd_signature_frames", "Frames from hooks.", "kind")
        self.kv_events = counter("eldrd_kv_events", "Blocks in the KV cache events of vLLM.", "kind")
        self.reloads = counter("eldrd_reloads", "Reloads of the configuration.", "outcome")
        self.captured = counter("eldrd_captured", "Signatures offered to the capture.", "outcome")
        self.refits = counter("eldrd_refits", "Online refits of the partition.", "outcome")
        self.refit_objective = Gauge(
            "eldrd_refit_objective", "Mean cosine to the own centroid at the refit.", registry=r
        )
        self.refit_moved = Gauge("eldrd_refit_moved_share", "Requests that the refit moved to others.", registry=r)
        self.refit_seconds = histogram("eldrd_refit_seconds", "Time a refit takes.", _TTFT)
        self.ttft = histogram("eldrd_ttft_seconds", "Request to first content.", _TTFT)
        self.prefill = histogram("eldrd_prefill_seconds", "Prefill request to its answer.", _TTFT)
        text = "Wait for a signature after the prefill's answer."
        self.signature_wait = histogram("eldrd_signature_wait_seconds", text, _SHORT)
        text = "Mean gap between the tokens (or events) of a stream."
        self.tpot = histograms("eldrd_tpot_seconds", text, ("worker",), _TPOT, r)
        self.output_tokens = counter("eldrd_output_tokens", "Tokens (or events) streamed.").labels()
        self.generation = Gauge("eldrd_config_generation", "Configurations loaded since the start.", registry=r)

    def live(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        """A gauge."""

        def family() -> Metric:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for values, number in read():
                gauge.add_metric(list(values), number)
            return gauge

        self._live.sources.append(family)

    def counter(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Sample]]) -> None:
        """A counter that another process keeps; ``_total`` is added to its name."""

        def family() -> Metric:
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, number in read():
                counter.add_metric(list(values), number)
            return counter

        self._live.sources.append(family)

    def summary(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Iterable[Pair]]) -> None:
        """A summary without quantiles that another process keeps: ``_sum`` and ``_count``."""

        def family() -> Metric:
            summary = SummaryMetricFamily(name, text, labels=labels)
            for values, count, total in read():
                summary.add_metric(list(values), count, total)
            return summary

        self._live.sources.append(family)

    def exposition(self) -> bytes:
        if self.workers is not None:
            # At a scrape, not at the reload: a removed worker's last requests count until they end.
            self.routed.keep(1, self.workers)
            self.tpot.keep(0, self.workers)
        return generate_latest(self.registry)
