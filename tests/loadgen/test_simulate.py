"""The simulator: its expectations against drawn tokens, its queues against arithmetic, its statistics against the paper."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.routing.build import build
from eldrd.signatures.capture import CaptureWriter
from loadgen.__main__ import main
from loadgen.simulate import CELLS, cells, fits, report
from loadgen.simulate.engine import PREFILL_MS, PREFILL_TOKEN_MS, Change, Fleet, Trace, prefilled
from loadgen.simulate.population import Population, Shape, _selected, drifted, joined, population, replayed
from loadgen.simulate.renewal import Renewal
from loadgen.simulate.scenario import LANGUAGE, QWEN, TASK, Scenario, calibration, labels, trace

if TYPE_CHECKING:
    from pathlib import Path

    from eldrd.partitions.file import Partition
    from eldrd.routing.policy import Policy

SMALL = Shape("small", 4, 32, 4, base_ms=5.0, expert_ms=0.5, request_ms=0.1)


@pytest.fixture(scope="module")
def people() -> Population:
    return population(SMALL, TASK, 200, 0)


def jsq(workers: int) -> object:
    return build("jsq", partition=None, workers=[f"d{i}" for i in range(workers)], tau=0.1)


def even(n: int, gap: float, output: int = 100) -> Trace:
    return Trace(np.arange(n) * gap, np.arange(n), np.full(n, output), np.ones(n, np.bool_))


def test_selection_is_that_of_the_top_k_of_noisy_logits() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(0, 2, (1, 1, 32)).astype(np.float32)
    expected = _selected(z, 4)[0, 0]
    assert expected.sum() == pytest.approx(4, abs=1e-2)
    picks = np.argsort(-(z[0, 0] + rng.gumbel(size=(40_000, 32))), axis=1)[:, :4]
    drawn = np.bincount(picks.ravel(), minlength=32) / 40_000
    assert np.abs(expected - drawn).max() < 0.05
    assert np.corrcoef(expected, drawn)[0, 1] > 0.99


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([1, 4]))
def test_expected_active_experts_are_those_of_sampled_steps(seed: int, batch: int, ranks: int) -> None:
    """A of a batch, after others have come and gone, is the mean over steps drawn token by token."""
    rng = np.random.default_rng(seed)
    shape = replace(SMALL, ranks=ranks)
    p = rng.random((2 * batch, shape.layers * shape.experts)).astype(np.float32) ** 4 * 0.9
    none = np.zeros((2 * batch, shape.layers, shape.experts), np.int32)
    crowd = Population(shape, none, 1 - p, np.full(2 * batch, 10), np.zeros(2 * batch, np.int64))
    fleet = Fleet(crowd, 1, jsq(1))  # type: ignore[arg-type]
    order = rng.permutation(2 * batch)
    for i in order:
        fleet._batch(0, crowd.free[i], joins=True)
    for i in order[batch:]:
        fleet._batch(0, crowd.free[i], joins=False)
    there = p[order[:batch]]
    active = np.zeros((400, shape.layers, shape.ranks))
    for step in range(400):
        chosen = (rng.random(there.shape) < there).any(axis=0)
        active[step] = chosen.reshape(shape.layers, shape.ranks, -1).sum(axis=2)
    by_rank = active.mean(axis=0).max(axis=1).mean()
    assert fleet._workers[0].active == pytest.approx(by_rank, abs=0.25)


def test_step_times_queues_and_loss_by_hand(people: Population) -> None:
    apart = even(4, 60.0)
    out = Fleet(people, 2, jsq(2)).run(apart, 1)  # type: ignore[arg-type]
    active = (1 - people.free[:4]).sum(axis=1) / SMALL.layers
    assert out.tpot_ms == pytest.approx(5 + 0.5 * active + 0.1, rel=1e-3)
    assert out.requests.tolist() == [2, 2]
    assert out.batch == pytest.approx(1)
    slow = Fleet(people, 1, jsq(1), slowness=[2.0]).run(apart, 1)  # type: ignore[arg-type]
    assert slow.tpot_ms == pytest.approx(2 * out.tpot_ms)
    cost = (PREFILL_MS + PREFILL_TOKEN_MS * people.tokens[:4]) / 1e3
    assert prefilled(even(4, 0.0), people, 1) == pytest.approx(np.cumsum(cost))
    assert prefilled(even(4, 0.0), people, 4) == pytest.approx(cost)
    gone = Fleet(people, 2, jsq(2)).run(even(4, 0.01, 10_000), 4, [Change(1.0, 0, "leave"), Change(2.0, 0, "join")])  # type: ignore[arg-type]
    assert (gone.lost, len(gone.tpot_ms)) == (2, 2)


@pytest.mark.parametrize("name", ["union", "guarded_band", "p2c"])
def test_every_request_ends_and_policies_forget_it(people: Population, name: str) -> None:
    policy = build(name, partition=None, workers=["a", "b", "c"], tau=0.1, seed=1)
    n = 150
    changes = [Change(2.0, 1, "leave"), Change(4.0, 1, "join")]
    fleet = Fleet(people, 3, policy)
    out = fleet.run(even(n, 0.05), 4, changes)
    assert len(out.tpot_ms) + out.lost == n == out.requests.sum()
    assert out.lost > 0
    assert not fleet._in_flight.any()
    assert not fleet._admissions
    assert [f.value for f in policy.figures() if f.name == "active_experts"] in ([], [0, 0, 0])


@pytest.mark.parametrize("name", ["eldr", "soft_band"])
def test_refits_follow_the_traffic_and_keep_what_runs(name: str) -> None:
    mix = replace(TASK, domain=3.0, request=0.3)
    sample, new = population(SMALL, mix, 300, 1), population(SMALL, drifted(mix), 400, 0)
    workers = [f"d{i}" for i in range(4)]
    captured = sample.capture(np.random.default_rng(0))
    fitted = fits.partition(captured, sample, workers, "balanced", fits.STANDARD, 0)
    swaps = []

    def policy_of(partition: Partition, before: Policy | None = None) -> Policy:
        swaps.append(partition)
        return build(name, partition=partition, workers=workers, tau=0.1, before=before)

    traffic = Trace(np.arange(1600) * 0.025, np.arange(1600) % 400, np.full(1600, 100), np.arange(1600) >= 800)
    results = []
    for follows in (False, True):
        policy = policy_of(fitted)
        renewal = Renewal(fitted, policy, policy_of)
        fleet = Fleet(new, 4, policy)
        results.append(fleet.run(traffic, 16, renewed=renewal if follows else lambda *_: None))
        assert not fleet._admissions
        assert not any(f.value for f in fleet._policy.figures() if f.name == "active_experts")
        assert (fleet._policy is policy) is not follows
    assert len(swaps) >= 3
    assert results[1].active < results[0].active * (0.97 if name == "eldr" else 1.03)


def test_traces_have_the_rate_and_shape_they_are_asked_for(people: Population) -> None:
    for scenario in (Scenario(50.0), Scenario(50.0, bursts=True), Scenario(50.0, lengths="mixed", skew=5.0)):
        made = [trace(scenario, people, seed) for seed in range(6)]
        at = np.concatenate([t.at for t in made])
        assert len(at) / 6 / 95 == pytest.approx(50, rel=0.07)
        inside = np.mean(at % 16 < 4)
        assert inside == pytest.approx(0.55 if scenario.bursts else 0.26, abs=0.06)
        assert np.mean([t.output.mean() for t in made]) == pytest.approx(512, rel=0.05)
        first = np.mean(people.domains[np.concatenate([t.row for t in made])] == 0)
        own = np.mean(people.domains == 0)
        assert first == pytest.approx(scenario.skew * own / (scenario.skew * own + 1 - own), abs=0.03)


def test_labels_give_every_worker_a_domain_and_every_domain_a_worker() -> None:
    for mix in (TASK, LANGUAGE):
        crowd = population(SMALL, mix, 300, 1)
        for k in (2, 8, 16, 24):
            workers = [f"d{i}" for i in range(k)]
            homes = labels(crowd, workers)
            assert len(homes) == len(mix.weights)
            assert all(homes.values())
            assert {w for home in homes.values() for w in home} == set(workers)


@pytest.mark.parametrize(("mix", "low", "high"), [(TASK, 0.17, 0.21), (LANGUAGE, 0.03, 0.10)])
def test_populations_have_the_papers_statistics(mix: object, low: float, high: float) -> None:
    shape = replace(QWEN, layers=6)
    found = calibration(population(shape, mix, 900, 0))  # type: ignore[arg-type]
    assert low - 0.01 <= np.mean(list(found.saving.values())) <= high + 0.01, found
    assert 0.70 <= found.correlation <= 0.92


def test_drifted_and_replayed_populations(people: Population) -> None:
    new = population(SMALL, drifted(TASK), 200, 0)
    assert np.array_equal(joined(people, new, 0.0, 0).counts, people.counts)
    half = joined(people, new, 0.5, 0)
    same = (half.counts == people.counts).all(axis=(1, 2)).mean()
    assert same == pytest.approx(0.5, abs=0.12)
    again = replayed(people.capture(np.random.default_rng(0)), SMALL)
    assert np.corrcoef(again.free.ravel(), people.free.ravel())[0, 1] > 0.95
    with pytest.raises(ValueError, match="the capture has"):
        replayed(people.capture(np.random.default_rng(0)), QWEN)


def test_a_capture_is_replayed(people: Population, tmp_path: Path) -> None:
    captured = people.capture(np.random.default_rng(0))
    writer = CaptureWriter(tmp_path, SMALL.geometry, 1 << 30)
    for i in range(len(people)):
        writer.add(captured.prefill[i], int(people.tokens[i]), 512, captured.labels[i])
    while shard := writer.take_shard():
        writer.write(shard)
    (unit,) = cells.replay(tmp_path, QWEN, 1)
    found = cells.run(replace(unit, jobs=(cells.Job("main", "4/s", Scenario(4.0, decode=3), cells.SHORT),)))
    assert {r["model"] for r in found} == {"small"}
    assert {r["policy"] for r in found[1:]} == {c.label for c in cells.SHORT}


def rows() -> list[dict[str, object]]:
    made = []
    for seed in range(2):
        for policy, p50, p99 in (("jsq", 10.0, 20.0), ("p2c", 9.0 + seed, 30.0), ("eldr", 8.0, 21.0)):
            made.append(
                {
                    "model": "m",
                    "workload": "w",
                    "cell": "main",
                    "variant": "20/s",
                    "seed": seed,
                    "policy": policy,
                    "tpot_p50_ms": p50,
                    "tpot_p99_ms": p99,
                    "active_experts": 5.0,
                    "imbalance": 1.0,
                }
            )
    return made


def test_changes_are_against_the_best_load_balancer_of_each_seed() -> None:
    compared = {(r["policy"], r["seed"]): r for r in report.changes(rows())}
    assert compared["eldr", 0]["tpot_p50_ms_change"] == pytest.approx(8 / 9 - 1)
    assert compared["eldr", 1]["tpot_p50_ms_change"] == pytest.approx(8 / 10 - 1)
    assert compared["eldr", 1]["tpot_p99_ms_change"] == pytest.approx(0.05)
    (entry,) = [r for r in report.summary(rows()) if (r["policy"], r["variant"]) == ("eldr", "20/s")]
    values = [8 / 9 - 1, 8 / 10 - 1]
    assert entry["tpot_p50_ms_change"] == pytest.approx(np.mean(values))
    assert entry["tpot_p50_ms_change_ci"] == pytest.approx(12.706 * np.std(values, ddof=1) / np.sqrt(2), rel=1e-3)
    (over,) = report.worst(rows())
    assert (over["cells"], over["median_best"], over["p99_above"]) == (1, 1, 1)


def test_every_choice_of_cells_has_units_and_the_command_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in CELLS:
        units = cells.plan(choice, 2)
        assert units
        assert all(unit.jobs for unit in units), choice
    jobs = (cells.Job("main", "20/s", Scenario(4.0, decode=3), cells.SHORT),)
    small = cells.Unit(SMALL, TASK, 0, jobs)
    monkeypatch.setattr(cells, "REQUESTS", 200)
    monkeypatch.setattr(cells, "CALIBRATION", 60)
    found = cells.run(small)
    assert [r["policy"] for r in found[1:]] == [c.label for c in cells.SHORT]
    monkeypatch.setattr("loadgen.simulate.command.plan", lambda *_: [small])
    result = CliRunner().invoke(main, ["simulate", "--out", str(tmp_path), "--json", "--processes", "1"])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "quick.json").read_text())
    assert {r["policy"] for r in written["runs"][1:]} == {c.label for c in cells.SHORT}
    assert (tmp_path / "main.png").stat().st_size > 1000
