"""Which expert-parallel rank holds which expert of a worker that serves one cluster. Arithmetic only: no files.

A decode step waits for the rank with the most active experts, so the aim is to spread a cluster's hot experts evenly
(METRO, arXiv 2512.09277; ELDR, expert parallelism).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit

from eldrd.partitions.file import Placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Requests of a typical decode batch: with few only the hottest experts are active, with many nearly all are.
BATCH: Final = 32
_BATCHES: Final = 8
_MAX_FREQUENCY: Final = 0.98


def frequencies(counts: NDArray[np.int32], top_k: int) -> NDArray[np.float32]:
    """How likely a token of each request selects each expert, float32 [N, L, E] below 1, from counts [N, L, E]."""
    tokens = counts.sum(axis=2, keepdims=True, dtype=np.float32) / top_k
    p = np.zeros(counts.shape, np.float32)
    np.divide(counts, tokens, out=p, where=tokens > 0)
    np.minimum(p, _MAX_FREQUENCY, out=p)
    return p


def expected_active(p: NDArray[np.float32]) -> NDArray[np.float32]:
    """How likely each expert is active in a decode step of requests with frequencies p [B, L, E]: float32 [L, E]."""
    active: NDArray[np.float32] = 1 - np.exp(np.log1p(-p).sum(axis=0))
    return active


def place(
    counts: NDArray[np.int32], assignment: NDArray[np.int64], k: int, top_k: int, ranks: int, seed: int
) -> Placement:
    """The placement of E experts on ``ranks`` ranks of E / ranks each, for every cluster and layer.

    counts: int32 [N, L, E], of decode where they are known; assignment: int64 [N], the cluster of each of the N rows,
    none empty. Experts go, most active first, to the rank with the fewest active experts that has room (Graham's longest
    processing time rule). The balances compare it with consecutive experts on sampled batches of each cluster.
    Raises ValueError if E is not a multiple of ranks.
    """
    layers, experts = counts.shape[1:]
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{experts} experts do not split evenly over {ranks} ranks")
    placed = np.empty((k, layers, experts), np.int32)
    before, after = [], []
    rng = np.random.default_rng(seed)
    for cluster in range(k):
        members = np.flatnonzero(assignment == cluster)
        p = frequencies(counts[members], top_k)
        placed[cluster] = _longest_first(1 - (1 - p.mean(axis=0)) ** BATCH, ranks)
        for _ in range(_BATCHES):
            active = expected_active(p[rng.choice(len(members), BATCH)])
            before.append(imbalance(active, ranks))
            after.append(imbalance(np.take_along_axis(active, placed[cluster], axis=1), ranks))
    return Placement(ranks, placed, float(np.mean(before)), float(np.mean(after)))


def imbalance(active: NDArray[np.float32], ranks: int) -> float:
    """Active experts of the most loaded rank over the mean rank's, mean over the layers of active [L, E], whose experts
    lie rank by rank; 1 is even."""
    loads = active.reshape(len(active), ranks, -1).sum(axis=2)
    mean = loads.mean(axis=1)
    return float(np.divide(loads.max(axis=1), mean, out=np.ones(len(loads)), where=mean > 0).mean())


def _longest_first(load: NDArray[np.float32], ranks: int) -> NDArray[np.int32]:
    """Experts int32 [L, E] rank by rank for loads [L, E]."""
    order = np.argsort(-load, axis=1, kind="stable")
    placed: NDArray[np.int32] = _greedy(np.ascontiguousarray(load, np.float64), order, ranks)
    return placed


@njit(cache=True)
def _greedy(load: Any, order: Any, ranks: Any) -> Any:
    layers, experts = load.shape
    seats = experts // ranks
    out = np.empty((layers, experts), np.int32)
    for layer in range(layers):
        total = np.zeros(ranks)
        filled = np.zeros(ranks, np.int64)
        for e in order[layer]:
            best = -1
            for r in range(ranks):
                if filled[r] < seats and (best < 0 or total[r] < total[best]):
                    best = r
            out[layer, best * seats + filled[best]] = e
            filled[best] += 1
            total[best] += load[layer, e]
    return out
