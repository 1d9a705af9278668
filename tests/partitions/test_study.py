"""The study's figures against plain definitions, on captures where the answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy.stats import pearsonr

from eldrd.partitions import figures, quality, study
from eldrd.partitions.fit import fit
from eldrd.signatures.capture import Capture
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = Geometry("m", 3, (0, 2, 3), 12, 2, 16)


def capture(n: int = 60, seed: int = 0) -> Capture:
    rng = np.random.default_rng(seed)
    domain = np.arange(n) % 3
    taste = rng.dirichlet(np.full(12, 0.3), (3, 3))[domain]
    prefill = rng.poisson(taste * 60).astype(np.int32)
    decode = rng.poisson(taste * 200).astype(np.int32)
    tokens = np.ones(n, np.int32)
    return Capture(GEOMETRY, prefill, tokens, tokens, [f"x{d}" for d in domain], decode)


def test_study_is_json_and_draws(tmp_path: Path) -> None:
    c = capture()
    p = fit(c, ["d0", "d1", "d2"], ep_ranks=2)
    found = json.loads(json.dumps(study.study(p, c)))
    assert found["purity"] == 1
    assert sum(found["similarity"]["own"]) == sum(found["similarity"]["second"]) == 60
    trace = found["rho_by_layers"]
    assert sorted(trace["layers"]) == [0, 2, 3]
    assert trace["rho"][trace["peak"] - 1] == pytest.approx(p.rho, abs=1e-3)
    assert found["placement"]["balance_after"] <= found["placement"]["balance_before"]
    figures.draw(found, tmp_path / "all.png")
    alone = replace(c, decode=None)
    found = study.study(fit(alone, ["d0"]), alone)
    assert (found["transforms"], found["rho_by_layers"], found["correlation"]) == (None, None, None)
    assert found["active"]["counts"] == "prefill"
    figures.draw(found, tmp_path / "prefill.png")
    for name in ("all", "prefill"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_transforms_are_what_they_say() -> None:
    c = capture()
    assert c.decode is not None
    p = fit(c, ["d0", "d1", "d2"])
    found = study.transforms(p, c, c.decode, 0)
    counts, decode = c.prefill.astype(float), c.decode.reshape(60, -1)
    slow = {
        "count": counts,
        "count*idf": counts * p.idf,
        "sqrt": np.sqrt(counts),
        "sqrt*idf": np.sqrt(counts) * p.idf,
        "log1p*idf": np.log1p(counts) * p.idf,
        "binary": counts > 0,
    }
    assert found.keys() == slow.keys()
    for name, x in slow.items():
        assert found[name] == pytest.approx(quality.rho(x.reshape(60, -1), decode), abs=1e-4), name


def test_correlation_is_pearsons_expert_by_expert() -> None:
    c = capture()
    assert c.decode is not None
    found = study.correlation(c, c.decode)
    slow = []
    for layer in range(3):
        for e in range(12):
            if (c.decode[:, layer, e] > 0).mean() >= 0.05:
                a, b = (np.minimum(x[:, layer, e] / (x[:, layer].sum(1) / 2), 0.98) for x in (c.prefill, c.decode))
                slow.append(pearsonr(a, b).statistic if np.ptp(a) and np.ptp(b) else 0.0)
    assert found["experts"] == len(slow) == sum(found["histogram"])
    assert found["mean"] == pytest.approx(np.mean(slow), abs=1e-3)
    assert study.correlation(c, np.zeros_like(c.decode))["experts"] == 0


def test_batches_of_one_cluster_read_fewer_experts() -> None:
    c = capture()
    same = study.active(fit(c, ["d0", "d1", "d2"]), c, 0)
    one = study.active(fit(c, ["d0"]), c, 0)
    assert same["saved"] > 0.15
    assert abs(one["saved"]) < 0.03
    assert same["mixed"] == pytest.approx(one["mixed"], rel=0.02)


def test_moved_counts_names_not_rows() -> None:
    c = capture()
    p = fit(c, ["d0", "d1", "d2"])
    turned = replace(p, workers=("d2", "d0", "d1"), centroids=p.centroids[[2, 0, 1]])
    assert quality.moved(p, turned, c.prefill) == 0
    assert quality.moved(p, replace(p, workers=("d2", "d0", "d1")), c.prefill) == 1
