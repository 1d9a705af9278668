"""Expected active experts of a run: the replay against a batch worked out by hand, and the gauge weighted by steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadgen.client import Result
from loadgen.vllm.experts import Steps, Window, expected, summary

LAYERS, EXPERTS, TOP_K = 2, 16, 2


def prompt(first: int, tokens: int = 4000) -> np.ndarray:
    """Counts of a prompt whose tokens all select the same two experts of each layer."""
    counts = np.zeros((LAYERS, EXPERTS), np.int32)
    counts[:, first : first + TOP_K] = tokens
    return counts


def ran(at: float, worker: str, tokens: int, tpot: float) -> Result:
    return Result(at, 0, "ok", 0.0, 0.0, tpot, tokens, worker)


def test_requests_side_by_side_add_up_and_strangers_do_not() -> None:
    counts = np.stack([prompt(0), prompt(2), prompt(0)])
    # Worker a: two that differ, side by side; worker b: one alone. As many steps each.
    results = [ran(0, "a", 101, 0.02), ran(0, "a", 101, 0.02), ran(0, "b", 101, 0.02)]
    assert expected(results, counts, TOP_K) == pytest.approx((4 + 2) / 2, rel=0.03)
    # The same with the two alike on one worker.
    results = [ran(0, "a", 101, 0.02), ran(0, "b", 101, 0.02), ran(0, "a", 101, 0.02)]
    assert expected(results, counts, TOP_K) == pytest.approx(2, rel=0.03)


def test_a_step_counts_once_however_long_it_takes() -> None:
    counts = np.stack([prompt(0), prompt(2), prompt(4)])
    # a runs 100 steps of two requests at 40 ms, b 300 of one at 10 ms.
    results = [ran(0, "a", 101, 0.04), ran(0, "a", 101, 0.04), ran(1, "b", 301, 0.01)]
    assert expected(results, counts, TOP_K) == pytest.approx((100 * 4 + 300 * 2) / 400, rel=0.03)


def test_failed_requests_and_none_at_all() -> None:
    counts = np.stack([prompt(0), prompt(2)])
    lost = Result(0, 0, "broken")
    assert expected([ran(0, "a", 11, 0.02), lost], counts, TOP_K) == pytest.approx(2, rel=0.03)
    assert math.isnan(expected([lost, lost], counts, TOP_K))


def test_the_gauge_is_weighted_by_the_steps_made_while_it_stood() -> None:
    window = Window()
    window.add({"a": 10, "b": 0}, {"a": 0, "b": 0})
    window.add({"a": 10, "b": 0}, {"a": 4, "b": 9})
    window.add({"a": 10, "b": 0}, {"a": 6, "b": 0})
    window.add({"a": 40, "b": 10}, {"a": 0, "b": 0})
    assert window.mean == pytest.approx((30 * 5 + 10 * 9) / 40)
    # Steps that nobody expected anything of, as under a policy without the gauge, weigh nothing.
    window.add({"a": 90, "b": 10}, {})
    assert window.mean == pytest.approx((30 * 5 + 10 * 9) / 40)
    assert math.isnan(Window().mean)


def test_summary_takes_medians_and_knows_no_nan() -> None:
    rounds = [Steps(100, 3, 3.5, active, math.nan, 1) for active in (20.0, 30.0, 70.0)]
    assert summary(rounds, [21.0, 33.0, 60.0]) == {
        "active_experts": 30.0,
        "active_experts_predicted": 33.0,
        "active_experts_expected_live": None,
        "step_requests": 3.0,
        "step_tokens": 3.5,
        "steps": 300,
        "steps_missed": 3,
    }
