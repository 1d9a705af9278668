"""Counts of experts to unit signatures and their scores against centroids. Arithmetic only: no files, no policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


_INT32: Final = np.dtype(np.int32)


def idf(prefill: NDArray[np.int32]) -> NDArray[np.float32]:
    """Inverse document frequency, float32 [L, E], of counts int32 [N, L, E]: ln((N + 1) / (df + 1)), where df is how
    many requests select the expert at least once. Source: ELDR (arXiv 2607.00466), signature step 2."""
    df = np.count_nonzero(prefill, axis=0)
    weights: NDArray[np.float32] = np.log((len(prefill) + 1) / (df + 1)).astype(np.float32)
    return weights


def units(counts: NDArray[np.int32], idf: NDArray[np.float32], layers: NDArray[np.int32]) -> NDArray[np.float32]:
    """Unit signatures float32 [N, S * E] of counts int32 [N, L, E]: counts x idf on the layers of the mask, one L2
    norm over all of them. A request whose every expert weighs nothing stays the zero vector."""
    x = counts[:, layers].astype(np.float32)
    x *= idf[layers]
    x = x.reshape(len(counts), -1)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    np.divide(x, norms, out=x, where=norms > 0)
    return x


def unit_rows(
    rows: Sequence[NDArray[np.int32]], idf: NDArray[np.float32], layers: NDArray[np.int32]
) -> NDArray[np.float32]:
    """``units`` of N separate rows int32 [L * E], without a copy of them all, and without the GIL for long: the loop's
    thread goes on meanwhile."""
    weights = np.ascontiguousarray(idf[layers], np.float32)
    x = np.empty((len(rows), weights.size), np.float32)
    for row, out in zip(rows, x, strict=True):
        _unit(row, layers, weights, out)
    return x


class Scorer:
    """Scores of one request against every centroid, compiled; the daemon's side of ``units``.

    centroids float32 [K, S * E]; idf float32 [L, E]; layers int32 [S], positions into L. Not thread safe.
    """

    def __init__(self, centroids: NDArray[np.float32], idf: NDArray[np.float32], layers: NDArray[np.int32]) -> None:
        self.width: int = idf.size
        self._layers = np.array(layers, np.int32)
        self._weights = np.array(idf[layers], np.float32)
        self._centroids = np.array(centroids, np.float32, order="C")
        if self._centroids.ndim != 2 or self._centroids.shape[1] != self._weights.size:
            raise ValueError(f"centroids are {centroids.shape}, expected [K, {self._weights.size}]")
        self._scratch = np.empty(self._weights.size, np.float32)

    def __call__(self, counts: NDArray[np.int32]) -> NDArray[np.float32]:
        """Cosine similarities float32 [K] of counts int32 [L * E]; all 0 for a zero vector."""
        if counts.ndim != 1 or counts.size != self.width or counts.dtype is not _INT32 or not counts.flags.carray:
            counts = np.require(counts, _INT32, ["C", "A", "W"]).reshape(self.width)
        scores: NDArray[np.float32] = _scores(counts, self._layers, self._weights, self._centroids, self._scratch)
        return scores


@njit(cache=True, nogil=True, fastmath=True)
def _unit(counts: Any, layers: Any, weights: Any, out: Any) -> None:
    experts = weights.shape[1]
    square = np.float32(0)
    for s in range(layers.size):
        start = layers[s] * experts
        for e in range(experts):
            value = np.float32(counts[start + e]) * weights[s, e]
            out[s * experts + e] = value
            square += value * value
    if square > 0:
        out *= np.float32(1) / np.sqrt(square)


@njit(cache=True, nogil=True, fastmath=True)
def _scores(counts: Any, layers: Any, weights: Any, centroids: Any, x: Any) -> Any:
    experts = weights.shape[1]
    square = np.float32(0)
    for s in range(layers.size):
        start = layers[s] * experts
        count, weight, cell = counts[start : start + experts], weights[s], x[s * experts : (s + 1) * experts]
        for e in range(experts):
            value = np.float32(count[e]) * weight[e]
            cell[e] = value
            square += value * value
    k = centroids.shape[0]
    out = np.zeros(k, np.float32)
    if square == 0:
        return out
    scale = np.float32(1) / np.sqrt(square)
    # Four centroids a pass: independent sums keep the multipliers busy, and x is read once for four rows.
    for i in range(0, k - 3, 4):
        row0, row1, row2, row3 = centroids[i], centroids[i + 1], centroids[i + 2], centroids[i + 3]
        sum0 = sum1 = sum2 = sum3 = np.float32(0)
        for d in range(x.size):
            value = x[d]
            sum0 += row0[d] * value
            sum1 += row1[d] * value
            sum2 += row2[d] * value
            sum3 += row3[d] * value
        out[i], out[i + 1], out[i + 2], out[i + 3] = sum0 * scale, sum1 * scale, sum2 * scale, sum3 * scale
    for i in range(k - k % 4, k):
        row0 = centroids[i]
        sum0 = np.float32(0)
        for d in range(x.size):
            sum0 += row0[d] * x[d]
        out[i] = sum0 * scale
    return out
