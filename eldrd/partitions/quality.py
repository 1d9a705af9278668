"""How good a partition is: rho, balance, similarity and purity, as plain numbers. No printing, no fitting."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from scipy.stats import spearmanr

from eldrd.partitions import layers
from eldrd.partitions.transform import units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition
    from eldrd.signatures.capture import Capture

MAX_PAIRS: Final = 20_000


def sample_pairs(n: int, seed: int, limit: int = MAX_PAIRS) -> NDArray[np.int64]:
    """Pairs i < j of 0..n-1, int64 [P, 2]: all of them, or ``limit`` distinct ones drawn evenly."""
    total = n * (n - 1) // 2
    rng = np.random.default_rng(seed)
    flat = np.arange(total) if total <= limit else rng.choice(total, limit, replace=False)
    # Pair number f counts row by row through the strict lower triangle: j is its row, i its column.
    j = np.floor((1 + np.sqrt(1 + 8 * flat.astype(np.float64))) / 2).astype(np.int64)
    j -= j * (j - 1) // 2 > flat
    return np.stack([flat - j * (j - 1) // 2, j], axis=1)


def cosine_distances(x: NDArray[Any], pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 - cosine for pairs int64 [P, 2] of the rows of x [N, D]: float64 [P]. A zero row is at distance 1 of all."""
    x = np.ascontiguousarray(x, np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float64))
    dots = layers.pair_dots(x[:, None, :], pairs)[0]
    scale = norms[pairs[:, 0]] * norms[pairs[:, 1]]
    cosines: NDArray[np.float64] = np.divide(dots, scale, out=np.zeros_like(dots), where=scale > 0)
    return 1 - cosines


def trace(capture: Capture, idf: NDArray[np.float32], seed: int, *, beyond_peak: bool = False) -> layers.Trace:
    """The greedy search for the layer mask on counts x idf of a capture with decode counts."""
    if capture.decode is None:
        raise ValueError("the capture has no decode counts")
    pairs = sample_pairs(len(capture.prefill), seed)
    wanted = cosine_distances(capture.decode.reshape(len(capture.decode), -1), pairs)
    x = capture.prefill.astype(np.float32)
    x *= idf
    return layers.greedy(x, wanted, pairs, beyond_peak=beyond_peak)


def rho(signatures: NDArray[Any], decode: NDArray[Any], seed: int = 0) -> float | None:
    """Spearman correlation, over sampled pairs of requests, of the cosine distances of their signatures [N, D] and of
    their decode counts [N, L * E]; None where either kind of distance is constant. Source: ELDR, signature step 3."""
    pairs = sample_pairs(len(signatures), seed)
    return spearman(cosine_distances(signatures, pairs), cosine_distances(decode, pairs))


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Spearman correlation of two rows; None where either is constant or too short."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(spearmanr(a, b).statistic)


def purity(labels: Sequence[str | None], assignment: NDArray[np.int64]) -> float | None:
    """Share of the labelled requests that share their worker's most frequent label; None without labels.

    assignment: int64 [N], the worker of each request. 1 / number of labels is chance, 1 is one domain a worker.
    """
    pairs = Counter((int(k), label) for k, label in zip(assignment, labels, strict=True) if label is not None)
    best: Counter[int] = Counter()
    for (k, _), n in pairs.items():
        best[k] = max(best[k], n)
    return best.total() / pairs.total() if pairs else None


def nearest(partition: Partition, prefill: NDArray[np.int32]) -> NDArray[np.int64]:
    """The row of the nearest centroid of each request, int64 [N], for counts [N, L, E]."""
    scores = units(prefill, partition.idf, partition.layers) @ partition.centroids.T
    rows: NDArray[np.int64] = scores.argmax(axis=1)
    return rows


def moved(old: Partition, new: Partition, prefill: NDArray[np.int32]) -> float:
    """Share of the requests [N, L, E] whose nearest worker is another one in ``new`` than in ``old``."""
    before, after = (np.array(p.workers)[nearest(p, prefill)] for p in (old, new))
    return float((before != after).mean())


def report(partition: Partition, capture: Capture) -> dict[str, Any]:
    """The quality of a partition on a capture, as JSON-ready numbers.

    requests: N; layers: layers used; layers_total: L; cluster_sizes, labels: requests per worker (and per label) when
    each goes to its nearest centroid; imbalance: largest size over the mean; fit_sizes: the balanced sizes of the fit;
    own, second: mean cosine to the nearest and second nearest centroid (second None for one worker); in_band: mean
    number of workers within tau of the best; rho: see Partition; purity: see ``purity``.
    Raises ValueError where capture and partition have different shapes.
    """
    if capture.geometry.shape != partition.geometry.shape:
        shapes = f"{capture.geometry.shape}, the partition {partition.geometry.shape}"
        raise ValueError(f"the capture has layers x experts {shapes}")
    scores = units(capture.prefill, partition.idf, partition.layers) @ partition.centroids.T
    nearest = scores.argmax(axis=1)
    ranked = np.sort(scores, axis=1)
    sizes = np.bincount(nearest, minlength=len(partition.workers))
    labels: dict[str, Counter[str]] = {worker: Counter() for worker in partition.workers}
    for k, label in zip(nearest, capture.labels, strict=True):
        if label is not None:
            labels[partition.workers[k]][label] += 1
    return {
        "requests": len(scores),
        "layers": int(partition.layers.size),
        "layers_total": partition.geometry.shape[0],
        "cluster_sizes": dict(zip(partition.workers, sizes.tolist(), strict=True)),
        "fit_sizes": dict(zip(partition.workers, partition.cluster_sizes, strict=True)),
        "labels": {worker: dict(counter.most_common()) for worker, counter in labels.items()},
        "imbalance": float(sizes.max() / sizes.mean()),
        "own": float(ranked[:, -1].mean()),
        "second": float(ranked[:, -2].mean()) if ranked.shape[1] > 1 else None,
        "in_band": float((scores >= ranked[:, -1:] - partition.tau).sum(axis=1).mean()),
        "rho": partition.rho,
        "purity": purity(capture.labels, nearest),
    }
