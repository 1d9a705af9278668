"""The proof's figures on rounds that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen import client
from loadgen.vllm import prove


def run_of(tpot_s: float, n: int = 20) -> list[client.Result]:
    return [client.Result(0.0, 0, "ok", tpot=float(tpot_s * s), tokens=9) for s in np.linspace(0.9, 1.1, n)]


def rounds(of: dict[str, list[float]]) -> dict[str, list[list[client.Result]]]:
    return {policy: [run_of(t) for t in times] for policy, times in of.items()}


def test_best_balancer_is_the_best_over_all_rounds() -> None:
    """Each round's own best would be whoever had luck."""
    drift = np.array([1.0, 1.4, 0.8, 1.1])
    lucky = np.array([1.3, 0.9, 1.3, 1.3])
    of = {
        "random": (0.05 * drift * lucky).tolist(),
        "round_robin": (0.06 * drift).tolist(),
        "jsq": (0.05 * drift).tolist(),
        "p2c": (0.07 * drift).tolist(),
        "eldr": (0.04 * drift * [1.01, 0.99, 1.0, 1.0]).tolist(),
    }
    result = prove.figures(rounds(of), {policy: [0.5] * 4 for policy in of})
    assert result["best_baseline"] == "jsq"
    eldr = result["policies"]["eldr"]
    assert eldr["against_best_baseline"] == pytest.approx(-0.2, abs=0.002)
    low, high = eldr["interval_95"]
    assert -0.22 < low < -0.2 < high < -0.18
    assert eldr["against_luckiest_baseline"] > eldr["against_best_baseline"]
    assert eldr["tpot_p50_ms_by_round"] == pytest.approx([40.4, 55.44, 32.0, 44.0])
    assert result["policies"]["jsq"]["against_best_baseline"] == 0


def test_one_round_has_no_interval() -> None:
    of = {policy: [0.05] for policy in (*prove.BASELINES, "eldr")}
    result = prove.figures(rounds(of), {policy: [1.0] for policy in of})
    assert result["policies"]["eldr"]["interval_95"] == [None, None]
    result["policies"] = {p: row | dict.fromkeys(prove._EXPERTS.values()) for p, row in result["policies"].items()}
    assert prove._table(result).row_count == 5
