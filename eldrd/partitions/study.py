"""What a capture says about the method: how well prefill tells decode, and what locality is worth. Numbers only.

For `eldrd fit --report`; figures.py draws it. Nothing here is needed to fit or to route.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eldrd.partitions import quality
from eldrd.partitions.placement import BATCH, expected_active, frequencies
from eldrd.partitions.transform import units

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition
    from eldrd.signatures.capture import Capture

_BATCHES: Final = 100
_EDGES: Final = [n / 40 for n in range(41)]
# An expert that hardly any request decodes with has no correlation worth the name.
_MIN_SHARE: Final = 0.05


def study(partition: Partition, capture: Capture, seed: int = 0) -> dict[str, Any]:
    """quality.report and, as JSON-ready numbers, None where the capture has no decode counts:

    transforms: rho of six ways to weight the counts, all layers; layers: rho after each layer of the greedy search, which
    goes on beyond the peak, with the layers' ids; similarity: histograms of requests' cosine to their nearest and second
    nearest centroid; correlation: of prefill and decode frequencies over requests, expert by expert; active: distinct
    experts a layer of sampled batches of one cluster and of all; placement: predicted balance of the ranks.
    """
    result = quality.report(partition, capture)
    result["similarity"] = _similarity(partition, capture)
    result["transforms"] = result["rho_by_layers"] = result["correlation"] = None
    if capture.decode is not None:
        result["transforms"] = transforms(partition, capture, capture.decode, seed)
        trace = quality.trace(capture, partition.idf, seed, beyond_peak=True)
        result["rho_by_layers"] = {
            "layers": [partition.geometry.layers[row] for row in trace.layers],
            "rho": list(trace.rho),
            "peak": int(trace.mask.size),
        }
        result["correlation"] = correlation(capture, capture.decode)
    result["active"] = active(partition, capture, seed)
    placed = partition.placement
    result["placement"] = placed and {
        "ranks": placed.ranks,
        "balance_before": placed.balance_before,
        "balance_after": placed.balance_after,
    }
    return result


def transforms(partition: Partition, capture: Capture, decode: NDArray[np.int32], seed: int) -> dict[str, float | None]:
    """rho of signatures made of all layers by each transform of the counts c with weights idf."""
    pairs = quality.sample_pairs(len(decode), seed)
    wanted = quality.cosine_distances(decode.reshape(len(decode), -1), pairs)
    weights = partition.idf
    made: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
        "count": lambda c: c,
        "count*idf": lambda c: c * weights,
        "sqrt": np.sqrt,
        "sqrt*idf": lambda c: np.sqrt(c) * weights,
        "log1p*idf": lambda c: np.log1p(c) * weights,
        "binary": lambda c: (c > 0).astype(np.float32),
    }
    counts = capture.prefill.astype(np.float32)
    return {
        name: quality.spearman(quality.cosine_distances(make(counts).reshape(len(counts), -1), pairs), wanted)
        for name, make in made.items()
    }


def correlation(capture: Capture, decode: NDArray[np.int32]) -> dict[str, Any]:
    """Pearson correlation over requests of how often prefill and decode select an expert, for the experts that at least
    _MIN_SHARE of the requests decode with: mean, quartiles, a histogram from 0 on, and how many experts that are."""
    used = (decode > 0).mean(axis=0) >= _MIN_SHARE
    a, b = (frequencies(c, capture.geometry.top_k)[:, used] for c in (capture.prefill, decode))
    a -= a.mean(axis=0)
    b -= b.mean(axis=0)
    scale = np.sqrt((a * a).sum(axis=0) * (b * b).sum(axis=0))
    r = np.divide((a * b).sum(axis=0), scale, out=np.zeros(scale.shape), where=scale > 0)
    if not r.size:
        return {"experts": 0, "mean": None, "quartiles": None, "edges": _EDGES, "histogram": [0] * (len(_EDGES) - 1)}
    return {
        "experts": int(r.size),
        "mean": float(r.mean()),
        "quartiles": [float(q) for q in np.quantile(r, (0.25, 0.5, 0.75))],
        "edges": _EDGES,
        "histogram": np.histogram(r.clip(0, 1), _EDGES)[0].tolist(),
    }


def active(partition: Partition, capture: Capture, seed: int) -> dict[str, Any]:
    """Distinct experts a layer that a decode step is expected to read, mean over sampled batches: of requests of one
    cluster (``same``; clusters as the fleet would hold them, by nearest centroid) and of any (``mixed``)."""
    counts, phase = (capture.prefill, "prefill") if capture.decode is None else (capture.decode, "decode")
    top_k = capture.geometry.top_k
    homes = quality.nearest(partition, capture.prefill)
    rng = np.random.default_rng(seed)
    everyone = np.arange(len(homes))

    def experts(members: NDArray[np.int64]) -> float:
        batch = frequencies(counts[rng.choice(members, BATCH)], top_k)
        return float(expected_active(batch).sum() / len(partition.idf))

    # A batch of one cluster is as likely as a request of it.
    same = [experts(np.flatnonzero(homes == homes[i])) for i in rng.choice(everyone, _BATCHES)]
    mixed = [experts(everyone) for _ in range(_BATCHES)]
    return {
        "counts": phase,
        "batch": BATCH,
        "same": float(np.mean(same)),
        "mixed": float(np.mean(mixed)),
        "saved": float(1 - np.mean(same) / np.mean(mixed)),
    }


def _similarity(partition: Partition, capture: Capture) -> dict[str, Any]:
    scores = np.sort(units(capture.prefill, partition.idf, partition.layers) @ partition.centroids.T, axis=1)
    own, second = scores[:, -1], scores[:, -2] if scores.shape[1] > 1 else None
    return {
        "edges": _EDGES,
        "own": np.histogram(own, _EDGES)[0].tolist(),
        "second": None if second is None else np.histogram(second, _EDGES)[0].tolist(),
    }
