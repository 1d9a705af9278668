"""Moves a partition's centroids to where recent traffic is, and to the workers there are. Pure computation: no clocks.

Runs in a thread of the daemon, so what takes long is NumPy or Numba without the GIL. IDF and layers stay the fit's:
they need decode counts or many requests, and so old and new centroids can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np

from eldrd.partitions import cluster
from eldrd.partitions.transform import unit_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition


# Relative gain below which a swap is not worth the policy and the file written anew; slow drift adds up to it.
WORTH: Final = 1e-3
# One request in so many is not fitted to but judges the fit, and its gain must be so many standard errors above chance.
HELD_OUT: Final = 4
_SURE: Final = 3.0


@dataclass(frozen=True, slots=True)
class Refit:
    """before, after: mean cosine of the requests held out to their balanced cluster's centroid, with the old partition and
    with one fitted to the others; moved: share of all whose nearest centroid is another worker's now; requests: how
    many."""

    partition: Partition
    before: float
    after: float
    moved: float
    requests: int


def refit(partition: Partition, rows: Sequence[NDArray[np.int32]], seed: int = 0) -> Refit | None:
    """Balanced K-means on recent requests' counts int32 [L * E], from the partition's centroids on.

    A clustering from fresh seeds, its clusters aligned to the workers so that as many requests as can be stay, replaces
    it where it is better by more than cluster.SLACK. In thousands of dimensions any window has better centroids of its own:
    whether they are the traffic's is what one request in HELD_OUT, which they have not seen, is asked. Where it says
    so, all requests move them on. None where it does not, by more than WORTH and beyond chance, and where fewer rows than
    the workers have any weight.
    """
    x = unit_rows(rows, partition.idf, partition.layers)
    x = x[x.any(axis=1)]
    k = len(partition.workers)
    rng = np.random.default_rng(seed)
    # Drawn: traffic may repeat itself in any step.
    held = np.isin(np.arange(len(x)), rng.permutation(len(x))[: len(x) // HELD_OUT])
    seen, unseen = x[~held], x[held]
    if len(seen) < k or len(unseen) < 2:
        return None
    nearest = (x @ partition.centroids.T).argmax(axis=1)
    found = cluster.kmeans(seen, partition.centroids)
    fresh = cluster.kmeans(seen, cluster.seeds(seen, k, rng))
    if fresh.objective > found.objective * (1 + cluster.SLACK):
        found = cluster.aligned(fresh, nearest[~held])
    before, after = _own(unseen, partition.centroids), _own(unseen, found.centroids)
    gain = after - before
    chance = _SURE * gain.std(ddof=1) / np.sqrt(len(gain))
    if not gain.mean() > max(before.mean() * WORTH, chance):
        return None
    found = cluster.kmeans(x, found.centroids)
    new = replace(
        partition,
        centroids=found.centroids,
        requests=len(x),
        cluster_sizes=tuple(np.bincount(found.assignment, minlength=k).tolist()),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        placement=None,
    )
    moved = float(((x @ found.centroids.T).argmax(axis=1) != nearest).mean())
    return Refit(new, float(before.mean()), float(after.mean()), moved, len(x))


def _own(x: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cosine float32 [N] of each row to the centroid of its balanced cluster."""
    scores = x @ centroids.T
    own: NDArray[np.float32] = scores[np.arange(len(x)), cluster.balanced_assignment(scores)]
    return own


def adapt(partition: Partition, workers: Sequence[str]) -> Partition | None:
    """The partition for these workers, in this order, until a refit has seen their traffic; None if it knows none.

    The centroid of a worker that left goes with it: its requests, and no others, go to the nearest of the rest. A worker
    that joined shares the centroid of the worker with the largest cluster, so its scores are equal and the two take that
    cluster's requests by load: half of one cluster moves, nothing else, and no cold worker draws more than its share.
    The next refit tells the two apart.
    """
    known = [w for w in workers if w in partition.workers]
    if not known:
        return None
    if tuple(workers) == partition.workers:
        return partition
    source = {w: partition.workers.index(w) for w in known}
    sizes = {w: partition.cluster_sizes[row] for w, row in source.items()}
    for worker in workers:
        if worker not in source:
            largest = max(sizes, key=sizes.__getitem__)
            source[worker] = source[largest]
            sizes[worker] = sizes[largest] // 2
            sizes[largest] -= sizes[worker]
    return replace(
        partition,
        centroids=partition.centroids[[source[w] for w in workers]],
        workers=tuple(workers),
        requests=sum(sizes.values()),
        cluster_sizes=tuple(sizes[w] for w in workers),
        placement=None,
    )


def continues(state: Partition, base: Partition) -> bool:
    """Whether a refitted partition began as ``base``, and no later than it: then it goes on where that left off."""
    return (
        state.geometry == base.geometry
        and np.array_equal(state.idf, base.idf)
        and np.array_equal(state.layers, base.layers)
        and datetime.fromisoformat(state.created) >= datetime.fromisoformat(base.created)
    )
