"""Fits a partition to a capture: IDF, layer mask, balanced K-means. Pure computation: no files, no printing."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata
from sklearn.cluster import kmeans_plusplus

from eldrd.partitions import quality
from eldrd.partitions.file import Partition
from eldrd.partitions.transform import idf as inverse_document_frequency
from eldrd.partitions.transform import units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd.signatures.capture import Capture

_MAX_ITERATIONS = 50


class FitError(ValueError):
    """A capture that no partition can be fitted to."""


class FitWarning(UserWarning):
    """The fit did something else than asked, for want of data."""


def fit(
    capture: Capture,
    workers: Sequence[str],
    *,
    tau: float = 0.1,
    seed: int = 0,
    restarts: int = 4,
    layers: Literal["all", "greedy"] = "all",
    max_requests: int = 2_000,
) -> Partition:
    """Fit one unit centroid per worker by Hungarian-balanced K-means in cosine geometry (ELDR, arXiv 2607.00466).

    Every worker gets floor(N / K) or ceil(N / K) of the N clustered requests. Requests whose experts all weigh nothing
    are left out, and of more than max_requests a sample is clustered, as assignment takes O(N^3); IDF uses all.
    ``layers="greedy"`` adds the layer that raises rho most until none does; a capture without decode counts cannot
    tell, so all layers are used and a FitWarning says so. The best of ``restarts`` seedings is kept. Same input and
    seed, same partition. Raises FitError for fewer usable requests than workers and for repeated or no workers.
    """
    if not workers or len(set(workers)) < len(workers) or not all(workers):
        raise FitError("workers must be unique names, at least one")
    prefill = capture.prefill
    if len(prefill) < len(workers):
        raise FitError(f"{len(prefill)} requests cannot make {len(workers)} clusters: capture at least one per worker")
    idf = inverse_document_frequency(prefill)
    mask = np.arange(prefill.shape[1], dtype=np.int32)
    if layers == "greedy":
        if capture.decode is None:
            warnings.warn("no decode counts in the capture: all layers are used", FitWarning, stacklevel=2)
        else:
            mask = _greedy_layers(prefill * idf, capture.decode, seed)
    signatures = units(prefill, idf, mask)
    usable = np.flatnonzero(signatures.any(axis=1))
    if len(usable) < len(workers):
        raise FitError(
            f"only {len(usable)} of {len(prefill)} requests select an expert that others do not, "
            f"too few for {len(workers)} clusters: capture more varied or shorter prompts"
        )
    if len(usable) > max_requests:
        usable = np.sort(np.random.default_rng(seed).choice(usable, max(max_requests, len(workers)), replace=False))
    signatures = signatures[usable]
    rho = None
    if capture.decode is not None:
        decode = capture.decode[usable]
        rho = quality.rho(signatures, decode.reshape(len(decode), -1), seed)
    runs = (_balanced_kmeans(signatures, len(workers), (seed, restart)) for restart in range(max(1, restarts)))
    _, centroids, assignment = max(runs, key=lambda run: run[0])
    return Partition(
        centroids=centroids,
        idf=idf,
        layers=mask,
        workers=tuple(workers),
        geometry=capture.geometry,
        tau=tau,
        requests=len(signatures),
        rho=rho,
        cluster_sizes=tuple(np.bincount(assignment, minlength=len(workers)).tolist()),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def balanced_assignment(similarity: NDArray[np.float32]) -> NDArray[np.int64]:
    """The cluster int64 [N] of each row of similarity [N, K] that maximises the sum with every cluster of floor(N / K)
    or ceil(N / K) rows (Malinen & Franti 2014)."""
    n, k = similarity.shape
    cap = -(-n // k)
    cost = np.zeros((k * cap, k * cap), np.float64)
    cost[:n] = np.repeat(-similarity, cap, axis=1)
    # Every cluster has cap seats. The k * cap - n seats too many are taken by dummies, which may sit only in a
    # cluster's last seat, so no cluster goes short by more than one.
    cost[n:] = 1e3
    cost[n:, cap - 1 :: cap] = 0
    _, seats = linear_sum_assignment(cost)
    return np.asarray(seats[:n] // cap, np.int64)


def _balanced_kmeans(
    x: NDArray[np.float32], k: int, seed: tuple[int, int]
) -> tuple[float, NDArray[np.float32], NDArray[np.int64]]:
    """One run on unit rows x [N, D]: the sum of similarities, centroids float32 [K, D], the cluster of each row."""
    centroids, _ = kmeans_plusplus(x, k, random_state=np.random.RandomState(seed))
    assignment = np.full(len(x), -1, np.int64)
    for _ in range(_MAX_ITERATIONS):
        previous, assignment = assignment, balanced_assignment(x @ centroids.T)
        if np.array_equal(previous, assignment):
            break
        centroids = _means(x, assignment, k)
    return float(np.sum(x * centroids[assignment], dtype=np.float64)), centroids, assignment


def _means(x: NDArray[np.float32], assignment: NDArray[np.int64], k: int) -> NDArray[np.float32]:
    """Normalised means float32 [K, D]. No mean is zero: rows are unit, not negative, and no cluster is empty."""
    members = (assignment == np.arange(k)[:, None]).astype(np.float32)
    sums: NDArray[np.float32] = members @ x
    sums /= np.linalg.norm(sums, axis=1, keepdims=True)
    return sums


def _greedy_layers(x: NDArray[Any], decode: NDArray[np.int32], seed: int) -> NDArray[np.int32]:
    """Row positions int32 [S] of the layers that greedily raise rho, for weighted counts x [N, L, E]."""
    n, total, _ = x.shape
    pairs = quality.sample_pairs(n, seed)
    wanted = _standardised_ranks(quality.cosine_distances(decode.reshape(n, -1), pairs))
    # The cosine over a set of layers needs only sums of per-layer products, so each is computed once.
    dots = np.stack([_pair_dots(x[:, layer], pairs) for layer in range(total)])
    squares = np.einsum("nle,nle->ln", x, x, dtype=np.float64)
    chosen: list[int] = []
    dot, square, best = np.zeros(len(pairs)), np.zeros(n), -np.inf
    while len(chosen) < total:
        gains = {
            layer: _correlation(dot + dots[layer], square + squares[layer], pairs, wanted)
            for layer in range(total)
            if layer not in chosen
        }
        layer = max(gains, key=gains.__getitem__)
        if gains[layer] <= best:
            break
        best = gains[layer]
        chosen.append(layer)
        dot, square = dot + dots[layer], square + squares[layer]
    return np.array(sorted(chosen), np.int32)


def _pair_dots(x: NDArray[Any], pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    dots: NDArray[np.float64] = np.einsum("pe,pe->p", x[pairs[:, 0]], x[pairs[:, 1]], dtype=np.float64)
    return dots


def _correlation(
    dot: NDArray[np.float64], square: NDArray[np.float64], pairs: NDArray[np.int64], wanted: NDArray[np.float64]
) -> float:
    scale = np.sqrt(square[pairs[:, 0]] * square[pairs[:, 1]])
    distance = 1 - np.divide(dot, scale, out=np.zeros_like(dot), where=scale > 0)
    return float(_standardised_ranks(distance) @ wanted / len(wanted))


def _standardised_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    ranks = rankdata(values)
    deviation = ranks.std()
    centred: NDArray[np.float64] = ranks - ranks.mean()
    return centred / deviation if deviation > 0 else centred
