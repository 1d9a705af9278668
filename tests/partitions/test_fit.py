"""The fit: recovery of planted domains and layers, stable workers over refits, honest refusals."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from eldrd.partitions import quality
from eldrd.partitions.cluster import balanced_assignment
from eldrd.partitions.file import load, save
from eldrd.partitions.fit import FitError, FitWarning, fit
from eldrd.partitions.transform import idf, units
from eldrd.signatures.capture import Capture
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from pathlib import Path


def planted(n: int = 120, domains: int = 4, noisy_layers: int = 0, seed: int = 0) -> Capture:
    """Requests of several domains that prefer experts of their own, plus layers of pure noise; decode like prefill."""
    rng = np.random.default_rng(seed)
    layers, experts = 3 + noisy_layers, 16
    labels = rng.permutation(np.arange(n) % domains)
    taste = rng.dirichlet(np.full(experts, 0.2), (domains, layers))[labels]
    prefill = rng.poisson(taste * 40).astype(np.int32)
    decode = rng.poisson(taste * 400).astype(np.int32)
    prefill[:, 3:] = rng.poisson(rng.dirichlet(np.full(experts, 0.1), (n, noisy_layers)) * 400)
    decode[:, 3:] = 0
    geometry = Geometry("m", 77, tuple(range(layers)), experts, 2, 16)
    tokens = np.ones(n, np.int32)
    return Capture(geometry, prefill, tokens, tokens, [f"domain{d}" for d in labels], decode)


def test_recovers_planted_domains(tmp_path: Path) -> None:
    capture = planted()
    p = fit(capture, ["d0", "d1", "d2", "d3"])
    assert p.cluster_sizes == (30, 30, 30, 30)
    assert p.requests == 120
    assert p.workers == ("d0", "d1", "d2", "d3")
    assert p.geometry == capture.geometry
    assert set(p.layers.tolist()) <= {0, 1, 2}
    np.testing.assert_array_equal(p.idf, idf(capture.prefill))
    report = quality.report(p, capture)
    assert report["purity"] > 0.98
    assert report["own"] > report["second"] + 0.2
    assert p.rho == pytest.approx(
        quality.rho(units(capture.prefill, p.idf, p.layers), capture.decode.reshape(120, -1))  # type: ignore[union-attr]
    )
    save(p, tmp_path / "p")
    assert load(tmp_path / "p").centroids.tolist() == p.centroids.tolist()


def test_is_deterministic_and_restarts_do_not_hurt() -> None:
    capture = planted(domains=7, seed=3)
    workers = ["a", "b", "c", "d", "e"]
    one, same, more = fit(capture, workers, restarts=1), fit(capture, workers, restarts=1), fit(capture, workers)
    assert one.centroids.tolist() == same.centroids.tolist()
    x = units(capture.prefill, one.idf, one.layers)

    def objective(centroids: np.ndarray) -> float:
        similarity = x @ centroids.T
        return float(similarity[np.arange(len(x)), balanced_assignment(similarity)].sum())

    assert objective(more.centroids) >= objective(one.centroids) - 1e-3


@pytest.mark.parametrize(("n", "k"), [(5, 4), (7, 3), (4, 4), (3, 1)])
def test_no_cluster_is_empty(n: int, k: int) -> None:
    p = fit(planted(n), [f"d{i}" for i in range(k)])
    assert sorted(set(p.cluster_sizes)) in ([n // k], [n // k, -(-n // k)])
    np.testing.assert_allclose(np.linalg.norm(p.centroids, axis=1), 1, rtol=1e-5)


def test_greedy_drops_layers_of_noise() -> None:
    capture = planted(noisy_layers=4)
    p = fit(capture, ["d0", "d1"], layers="greedy")
    assert set(p.layers.tolist()) <= {0, 1, 2}
    everything = fit(capture, ["d0", "d1"], layers="all")
    assert p.rho is not None
    assert everything.rho is not None
    assert p.rho > everything.rho
    assert p.centroids.shape == (2, p.layers.size * 16)


def test_greedy_without_decode_counts_says_so() -> None:
    capture = replace(planted(), decode=None)
    with pytest.warns(FitWarning, match="all layers are used"):
        p = fit(capture, ["d0", "d1"], layers="greedy")
    assert p.layers.tolist() == [0, 1, 2]
    assert p.rho is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(capture, ["d0", "d1"])


def test_samples_large_captures() -> None:
    p = fit(planted(), ["d0", "d1"], max_requests=40)
    assert p.requests == 40
    assert sum(p.cluster_sizes) == 40


def test_requests_without_a_signature_are_left_out() -> None:
    capture = planted()
    capture.prefill[:10] = 0
    p = fit(capture, ["d0", "d1"])
    assert p.requests == 110


def test_refusals() -> None:
    capture = planted(3)
    with pytest.raises(FitError, match="3 requests cannot make 4 clusters"):
        fit(capture, ["a", "b", "c", "d"])
    with pytest.raises(FitError, match="workers must be unique"):
        fit(capture, ["a", "a"])
    with pytest.raises(FitError, match="workers must be unique names, at least one"):
        fit(capture, [])
    with pytest.raises(FitError, match="only 0 of 3 requests select an expert that others do not"):
        fit(replace(capture, prefill=np.ones_like(capture.prefill)), ["a"])
    with pytest.raises(FitError, match=r"previous partition has layers x experts \(3, 16\), the capture \(4, 16\)"):
        fit(planted(noisy_layers=1), ["a"], previous=fit(capture, ["a"]))
    with pytest.raises(FitError, match="16 experts do not split evenly over 3 ranks"):
        fit(capture, ["a"], ep_ranks=3)


def test_a_refit_of_the_same_requests_moves_none() -> None:
    capture = planted()
    first = fit(capture, ["d0", "d1", "d2", "d3"])
    again = fit(capture, ["d2", "d3", "d0", "d1"], previous=first, seed=8)
    assert again.workers == ("d2", "d3", "d0", "d1")
    assert quality.moved(first, again, capture.prefill) == 0


def test_a_refit_after_workers_left_and_joined() -> None:
    """Of eight domains on eight workers those of the workers that stay do not move."""
    capture = planted(240, domains=8, seed=2)
    first = fit(capture, [f"d{i}" for i in range(8)])
    homes = quality.nearest(first, capture.prefill)
    second = fit(capture, ["d0", "d1", "d2", "d3", "d4", "d5", "n0", "n1"], previous=first)
    stay = homes < 6
    now = np.array(second.workers)[quality.nearest(second, capture.prefill)]
    assert (now[stay] == np.array(first.workers)[homes[stay]]).mean() > 0.95
    assert set(now[~stay]) == {"n0", "n1"}


def test_no_worker_of_the_previous_partition_is_left() -> None:
    capture = planted()
    second = fit(capture, ["x", "y"], previous=fit(capture, ["a", "b"]))
    assert second.cluster_sizes == (60, 60)


def test_placement_is_of_the_final_clusters(tmp_path: Path) -> None:
    capture = planted(domains=2)
    p = fit(capture, ["d0", "d1"], ep_ranks=4)
    assert p.placement is not None
    assert p.placement.balance_after <= p.placement.balance_before
    save(p, tmp_path / "p")
    loaded = load(tmp_path / "p").placement
    assert loaded is not None
    assert loaded.experts.tolist() == p.placement.experts.tolist()
    assert (loaded.ranks, loaded.balance_before) == (4, p.placement.balance_before)
