"""Partitions for the experiments: the daemon's fit, and the variants it is compared with. Runs no fleet."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from sklearn.cluster import KMeans

from eldrd.partitions import cluster, quality
from eldrd.partitions.fit import fit
from eldrd.partitions.transform import units

if TYPE_CHECKING:
    from eldrd.partitions.file import Partition
    from eldrd.signatures.capture import Capture
    from loadgen.simulate.population import Population

STANDARD: Final = "count x idf"
TRANSFORMS: Final = ("count", STANDARD, "sqrt", "sqrt x idf", "binary", "binary x idf")


def transformed(source: Population, transform: str) -> Population:
    """A population whose counts are what another signature would count; in fixed point, as counts are whole."""
    base = transform.removesuffix(" x idf")
    if base == "count":
        return source
    counts = np.minimum(source.counts, 1) if base == "binary" else np.rint(64 * np.sqrt(source.counts))
    return replace(source, counts=counts.astype(np.int32))


def partition(
    captured: Capture, source: Population, workers: list[str], kind: str, transform: str, seed: int
) -> Partition:
    """The daemon's fit of a capture of ``source``. kind plain: K-means without balance; a transform without idf weighs
    all experts alike."""
    captured = replace(captured, prefill=transformed(source, transform).counts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = fit(captured, workers, restarts=2, seed=seed)
    if kind == "balanced" and transform.endswith(" x idf"):
        return fitted
    weights = fitted.idf if transform.endswith(" x idf") else np.ones_like(fitted.idf)
    x = units(captured.prefill, weights, fitted.layers)
    if kind == "plain":
        means = KMeans(len(workers), n_init=2, random_state=seed).fit(x).cluster_centers_
    else:
        means = cluster.kmeans(x, cluster.seeds(x, len(workers), np.random.default_rng(seed))).centroids
    centroids = (means / np.linalg.norm(means, axis=1, keepdims=True)).astype(np.float32)
    rho = None
    if captured.decode is not None:
        rho = quality.rho(x, captured.decode.reshape(len(x), -1), seed)
    return replace(fitted, centroids=centroids, idf=weights, rho=rho)
