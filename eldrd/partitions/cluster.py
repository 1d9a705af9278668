"""Balanced K-means in cosine geometry and the alignment of clusters to workers. Arithmetic only: no captures, no files.

Needs nothing but NumPy and Numba, for the daemon refits too; what takes long releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit

from eldrd.partitions.transform import unit_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_ITERATIONS: Final = 50
_EPSILON: Final = 1e-12
# How much better (relative) a clustering from fresh seeds must be before requests move for it.
SLACK: Final = 0.005
# Rows a cluster that seeds are drawn from: more would cost more than they help, as iterations follow.
_SEED_ROWS: Final = 20


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """objective: mean similarity of the rows to their cluster's centroid; centroids: float32 [K, D] unit rows;
    assignment: int64 [N], balanced."""

    objective: float
    centroids: NDArray[np.float32]
    assignment: NDArray[np.int64]

    def reordered(self, order: NDArray[np.int64]) -> Clustering:
        """The same clusters, cluster ``order[i]`` as number i."""
        return Clustering(self.objective, self.centroids[order], np.argsort(order)[self.assignment])


def balanced_assignment(similarity: NDArray[Any]) -> NDArray[np.int64]:
    """The cluster int64 [N] of each row of similarity [N, K] that maximises the sum with every cluster of floor(N / K)
    or ceil(N / K) rows (the assignment of Malinen & Franti 2014).

    Exact, as a minimum-cost flow: rows come one by one, each along the cheapest chain of moves that ends in a free seat.
    The K clusters are the only nodes, so 4,000 rows and 64 clusters take a second where the N x N assignment problem
    takes minutes. Square input solves the plain assignment problem. Raises ValueError where a value is not finite.
    """
    similarity = np.ascontiguousarray(similarity, np.float64)
    if not np.isfinite(similarity).all():
        raise ValueError("similarities must be finite")
    n, k = similarity.shape
    if n == 0:
        return np.zeros(0, np.int64)
    assignment: NDArray[np.int64] = _assign(similarity, n // k, -(-n // k), 4 * k * (1 + np.ptp(similarity)))
    return assignment


def kmeans(x: NDArray[np.float32], centroids: NDArray[np.float32]) -> Clustering:
    """Balanced K-means of unit rows x [N, D], N >= K, from these centroids float32 [K, D] on."""
    k = len(centroids)
    assignment = np.full(len(x), -1, np.int64)
    for _ in range(_MAX_ITERATIONS):
        previous, assignment = assignment, balanced_assignment(x @ centroids.T)
        if np.array_equal(previous, assignment):
            break
        centroids = means(x, assignment, k)
    return Clustering(objective(x, centroids, assignment), centroids, assignment)


def objective(x: NDArray[np.float32], centroids: NDArray[np.float32], assignment: NDArray[np.int64]) -> float:
    """Mean similarity of rows x [N, D] to the centroids [K, D] they are assigned to."""
    return float(_own(x, centroids, assignment))


def means(x: NDArray[np.float32], assignment: NDArray[np.int64], k: int) -> NDArray[np.float32]:
    """Normalised means float32 [K, D] of non-empty clusters of unit rows without negative cells: none is zero."""
    members = (assignment == np.arange(k)[:, None]).astype(np.float32)
    sums: NDArray[np.float32] = members @ x
    sums /= np.linalg.norm(sums, axis=1, keepdims=True)
    return sums


def seeds(x: NDArray[np.float32], k: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """K rows of x [N, D] as first centroids, float32 [K, D], by k-means++ on a sample with the best of several candidates
    a step (Arthur & Vassilvitskii 2007; the candidates as in scikit-learn, which the daemon does without)."""
    if len(x) > _SEED_ROWS * k:
        x = x[rng.choice(len(x), _SEED_ROWS * k, replace=False)]
    n, trials = len(x), 2 + int(np.log(k))
    distances = 1 - x @ x.T
    chosen = [int(rng.integers(n))]
    nearest: NDArray[np.float32] = distances[chosen[0]]
    for _ in range(1, k):
        weights = np.maximum(nearest, 0).astype(np.float64)
        weights[chosen] = 0
        if not weights.any():  # only doubles of chosen rows are left
            weights[:] = 1
            weights[chosen] = 0
        candidates = rng.choice(n, trials, p=weights / weights.sum())
        left = np.minimum(nearest, distances[candidates])
        best = int(left.sum(axis=1).argmin())
        chosen.append(int(candidates[best]))
        nearest = left[best]
    return x[chosen]


def overlap(old: NDArray[np.int64], new: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """How many rows have old cluster i and new cluster j, float64 [k, k]; old < 0: had no cluster."""
    known = old >= 0
    counts = np.zeros((k, k))
    np.add.at(counts, (old[known], new[known]), 1)
    return counts


def aligned(clustering: Clustering, old: NDArray[np.int64]) -> Clustering:
    """The clustering with its numbers chosen so that as many rows as can be keep their old cluster int64 [N] (< 0: had
    none); numbers that no row had take the clusters left over."""
    k = len(clustering.centroids)
    return clustering.reordered(balanced_assignment(overlap(old, clustering.assignment, k)))


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) what this module runs."""
    x = unit_rows(list(np.eye(3, dtype=np.int32)), np.ones((1, 3), np.float32), np.zeros(1, np.int32))
    kmeans(x, x[:2])


@njit(cache=True, nogil=True, fastmath=True)
def _own(x: Any, centroids: Any, assignment: Any) -> Any:
    total = 0.0
    for i in range(x.shape[0]):
        row, centroid = x[i], centroids[assignment[i]]
        for d in range(row.size):
            total += row[d] * centroid[d]
    return total / x.shape[0]


@njit(cache=True, nogil=True)
def _cheapest_moves(similarity: Any, members: Any, size: Any, a: Any, cost: Any, mover: Any) -> None:
    """Row a of cost [K, K] and mover [K, K]: the member that loses least by going from cluster a to each other."""
    k = similarity.shape[1]
    for b in range(k):
        cost[a, b] = np.inf
    for m in range(size):
        row = members[a, m]
        values = similarity[row]
        here = values[a]
        for b in range(k):
            loss = here - values[b]
            if loss < cost[a, b]:
                cost[a, b] = loss
                mover[a, b] = row
    cost[a, a] = np.inf


@njit(cache=True, nogil=True)
def _assign(similarity: Any, floor: Any, ceil: Any, big: Any) -> Any:
    """Successive shortest paths. A seat below ``floor`` earns ``big``, so none of those stays empty while a cluster has
    more than ``floor``; the residual graph has no negative cycle, so Bellman and Ford's relaxation ends."""
    n, k = similarity.shape
    assignment = np.full(n, -1, np.int64)
    members = np.empty((k, ceil), np.int64)
    place = np.empty(n, np.int64)
    sizes = np.zeros(k, np.int64)
    cost = np.full((k, k), np.inf)
    mover = np.zeros((k, k), np.int64)
    distance = np.empty(k)
    via = np.empty(k, np.int64)
    for row in range(n):
        for b in range(k):
            distance[b] = -similarity[row, b]
            via[b] = -1
        changed = True
        rounds = 0
        while changed and rounds < k:
            changed = False
            rounds += 1
            for a in range(k):
                for b in range(k):
                    through = distance[a] + cost[a, b]
                    if through < distance[b] - _EPSILON:
                        distance[b] = through
                        via[b] = a
                        changed = True
        end, best = -1, np.inf
        for b in range(k):
            if sizes[b] < ceil:
                total = distance[b] - (big if sizes[b] < floor else 0.0)
                if total < best:
                    best = total
                    end = b
        # Walk the chain back from the free seat: each cluster on it takes a row from the one before.
        b = end
        sizes[end] += 1
        slot = sizes[end] - 1
        steps = 0
        while via[b] >= 0 and steps < k:
            a = via[b]
            moved = mover[a, b]
            members[b, slot] = moved
            assignment[moved] = b
            slot, place[moved] = place[moved], slot
            b = a
            steps += 1
        members[b, slot] = row
        place[row] = slot
        assignment[row] = b
        b = end
        for _ in range(steps + 1):
            _cheapest_moves(similarity, members, sizes[b], b, cost, mover)
            b = via[b]
    return assignment
