"""Fits a partition to a capture: IDF, layer mask, balanced K-means, alignment. Pure computation: no files, no printing."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import numpy as np

from eldrd.partitions import cluster, quality
from eldrd.partitions.file import Partition
from eldrd.partitions.placement import place
from eldrd.partitions.transform import idf as inverse_document_frequency
from eldrd.partitions.transform import units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd.partitions.cluster import Clustering
    from eldrd.signatures.capture import Capture


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
    layers: Literal["auto", "all", "greedy"] = "auto",
    previous: Partition | None = None,
    ep_ranks: int = 1,
    max_requests: int = 8_000,
) -> Partition:
    """Fit one unit centroid per worker by Hungarian-balanced K-means in cosine geometry (ELDR, arXiv 2607.00466).

    Every worker gets floor(N / K) or ceil(N / K) of the N clustered requests. Requests whose experts all weigh nothing
    are left out, and of more than max_requests a sample is clustered; IDF uses all. ``layers="greedy"`` adds the layer
    that raises rho most until none does; a capture without decode counts cannot tell, so all layers are used, and unless
    that was left to ``"auto"`` a FitWarning says so. The best of ``restarts`` seedings is kept.

    previous: clusters go to workers so that as many requests as can be stay where that partition sends them; the
    clustering that starts from it is kept unless another is better by more than cluster.SLACK. ep_ranks: above 1 adds a
    Placement on so many ranks a worker. Same input and seed, same partition.
    Raises FitError for fewer usable requests than workers, repeated or no workers, a previous partition of another
    model, or ranks that do not divide the experts.
    """
    if not workers or len(set(workers)) < len(workers) or not all(workers):
        raise FitError("workers must be unique names, at least one")
    if previous is not None and previous.geometry.shape != capture.geometry.shape:
        shapes = f"{previous.geometry.shape}, the capture {capture.geometry.shape}"
        raise FitError(f"the previous partition has layers x experts {shapes}")
    if len(capture.prefill) < len(workers):
        raise FitError(
            f"{len(capture.prefill)} requests cannot make {len(workers)} clusters: capture at least one per worker"
        )
    idf = inverse_document_frequency(capture.prefill)
    mask = np.arange(len(idf), dtype=np.int32)
    if layers != "all" and capture.decode is not None:
        mask = quality.trace(capture, idf, seed).mask
    elif layers == "greedy":
        warnings.warn("no decode counts in the capture: all layers are used", FitWarning, stacklevel=2)
    signatures = units(capture.prefill, idf, mask)
    usable = np.flatnonzero(signatures.any(axis=1))
    if len(usable) < len(workers):
        raise FitError(
            f"only {len(usable)} of {len(signatures)} requests select an expert that others do not, "
            f"too few for {len(workers)} clusters: capture more varied or shorter prompts"
        )
    if len(usable) > max_requests:
        usable = np.sort(np.random.default_rng(seed).choice(usable, max(max_requests, len(workers)), replace=False))
    if len(usable) < len(signatures):
        signatures = signatures[usable]
    rho = None
    if capture.decode is not None:
        decode = capture.decode[usable]
        rho = quality.rho(signatures, decode.reshape(len(decode), -1), seed)
    found = _cluster(signatures, len(workers), seed, restarts, _old(previous, workers, capture.prefill[usable]))
    placement = None
    if ep_ranks > 1:
        counts = capture.prefill if capture.decode is None else capture.decode
        try:
            placement = place(counts[usable], found.assignment, len(workers), capture.geometry.top_k, ep_ranks, seed)
        except ValueError as e:
            raise FitError(str(e)) from None
    return Partition(
        centroids=found.centroids,
        idf=idf,
        layers=mask,
        workers=tuple(workers),
        geometry=capture.geometry,
        tau=tau,
        requests=len(signatures),
        rho=rho,
        cluster_sizes=tuple(np.bincount(found.assignment, minlength=len(workers)).tolist()),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        placement=placement,
    )


def _old(previous: Partition | None, workers: Sequence[str], prefill: NDArray[np.int32]) -> NDArray[np.int64] | None:
    """Where the previous partition sends each request: rows of ``workers`` int64 [N], -1 where that worker has left."""
    if previous is None:
        return None
    rows = np.array([workers.index(w) if w in workers else -1 for w in previous.workers], np.int64)
    old: NDArray[np.int64] = rows[quality.nearest(previous, prefill)]
    return old


def _cluster(x: NDArray[np.float32], k: int, seed: int, restarts: int, old: NDArray[np.int64] | None) -> Clustering:
    """The best of several balanced K-means, aligned to where requests went before, if that is known."""
    fresh = (
        cluster.kmeans(x, cluster.seeds(x, k, np.random.default_rng((seed, restart))))
        for restart in range(max(1, restarts))
    )
    best = max(fresh, key=lambda c: c.objective)
    if old is None:
        return best
    warm = cluster.kmeans(x, _start(x, old, k))
    if warm.objective >= best.objective * (1 - cluster.SLACK):
        best = warm
    return cluster.aligned(best, old)


def _start(x: NDArray[np.float32], old: NDArray[np.int64], k: int) -> NDArray[np.float32]:
    """Means float32 [K, D] of the requests that each worker had; a worker that had none shares the centroid of the one
    with the most for each that shares it, and balance tells the two apart."""
    sizes = np.bincount(old[old >= 0], minlength=k)
    if not sizes.any():
        return x[:k]
    source = np.arange(k)
    share = sizes.astype(np.float64)
    for worker in np.flatnonzero(sizes == 0):
        largest = int(share.argmax())
        source[worker] = source[largest]
        share[largest] /= 2
        share[worker] = share[largest]
    occupied = np.flatnonzero(sizes)
    number = np.full(k, -1)
    number[occupied] = np.arange(len(occupied))
    known = (old >= 0) & (sizes[old] > 0)
    centroids = cluster.means(x[known], number[old[known]], len(occupied))
    start: NDArray[np.float32] = centroids[number[source]]
    return start
