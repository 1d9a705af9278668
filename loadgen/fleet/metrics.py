"""The Prometheus page of an emulated worker, under vLLM's names (v1/metrics/loggers.py). Collects nothing itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import Metric

_LABELS = ("engine", "model_name")


class _Page(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(
    model: str,
    *,
    running: int,
    waiting: int,
    kv_usage: float,
    prefix_queries: int,
    prefix_hits: int,
    finished: Mapping[str, int],
    expired: int,
) -> bytes:
    """The page as Prometheus text."""
    own = ("0", model)
    families: list[Metric] = []
    for name, value in (
        ("num_requests_running", running),
        ("num_requests_waiting", waiting),
        ("kv_cache_usage_perc", kv_usage),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
        gauge.add_metric(own, value)
        families.append(gauge)
    for name, value in (
        ("prefix_cache_queries", prefix_queries),
        ("prefix_cache_hits", prefix_hits),
        ("nixl_num_kv_expired_reqs", expired),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", name.replace("_", " "), labels=_LABELS)
        counter.add_metric(own, value)
        families.append(counter)
    success = CounterMetricFamily("vllm:request_success", "finished requests", labels=(*_LABELS, "finished_reason"))
    for reason, n in finished.items():
        success.add_metric((*own, reason), n)
    families.append(success)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(families))
    return generate_latest(registry)
