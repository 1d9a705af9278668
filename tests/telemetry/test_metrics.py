"""Metrics: what is exposed, that gauges are read when scraped, and that no name is used twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from eldrd.telemetry.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eldrd.telemetry.metrics import Sample


def scraped(metrics: Metrics) -> dict[str, float]:
    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    names = [f.name for f in families]
    assert len(names) == len(set(names))
    assert all(name.startswith("eldrd_") for name in names)
    return {
        s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items())): s.value for f in families for s in f.samples
    }


def test_counted_and_observed() -> None:
    metrics = Metrics()
    metrics.requests.labels("/v1/completions", 200, "ok").inc()
    metrics.handoffs.labels("consumed").inc(2)
    metrics.ttft.observe(0.03)
    metrics.tpot.labels("d0").observe(0.011)
    samples = scraped(metrics)
    assert samples["eldrd_requests_total,endpoint=/v1/completions,outcome=ok,status=200"] == 1
    assert samples["eldrd_handoffs_total,outcome=consumed"] == 2
    assert samples["eldrd_ttft_seconds_bucket,le=0.02"] == 0
    assert samples["eldrd_ttft_seconds_bucket,le=0.05"] == 1
    assert samples["eldrd_tpot_seconds_bucket,le=0.015,worker=d0"] == 1
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_live_gauges_follow_the_state() -> None:
    metrics = Metrics()
    state = {"d0": 1.0}

    def read() -> Iterable[Sample]:
        return [(("decode", name), value) for name, value in state.items()]

    metrics.live("eldrd_in_flight", "Requests under way.", ("role", "worker"), read)
    assert scraped(metrics)["eldrd_in_flight,role=decode,worker=d0"] == 1
    state.pop("d0")
    state["d1"] = 2.0
    samples = scraped(metrics)
    assert "eldrd_in_flight,role=decode,worker=d0" not in samples
    assert samples["eldrd_in_flight,role=decode,worker=d1"] == 2


def test_live_counters_and_summaries_follow_the_state() -> None:
    metrics = Metrics()
    state = {"d0": (2, 30.5)}
    metrics.summary("eldrd_step", "Steps.", ("worker",), lambda: [((w,), n, s) for w, (n, s) in state.items()])
    metrics.counter("eldrd_missed", "Missed.", ("worker",), lambda: [((w,), float(n)) for w, (n, _) in state.items()])
    samples = scraped(metrics)
    assert (samples["eldrd_step_count,worker=d0"], samples["eldrd_step_sum,worker=d0"]) == (2, 30.5)
    assert samples["eldrd_missed_total,worker=d0"] == 2
    state.clear()
    assert not [name for name in scraped(metrics) if name.startswith(("eldrd_step", "eldrd_missed"))]


def test_instances_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.output_tokens.inc(5)
    assert scraped(other)["eldrd_output_tokens_total"] == 0
