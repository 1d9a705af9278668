"""The layer mask: which layers' experts tell best what a request will decode with. Arithmetic only: no captures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit
from scipy.stats import rankdata

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A gain of rho below this is noise of the sampled pairs, not a better mask.
_GAIN: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Trace:
    """layers: row positions in the order the greedy search added them; rho: what it was after each."""

    layers: tuple[int, ...]
    rho: tuple[float, ...]

    @property
    def mask(self) -> NDArray[np.int32]:
        """The layers up to the first peak of rho, ascending int32 [S]."""
        end = 1
        while end < len(self.rho) and self.rho[end] > self.rho[end - 1] + _GAIN:
            end += 1
        return np.array(sorted(self.layers[:end]), np.int32)


def greedy(
    x: NDArray[np.float32], wanted: NDArray[Any], pairs: NDArray[np.int64], *, beyond_peak: bool = False
) -> Trace:
    """Add the layer that raises rho most until none does, or, ``beyond_peak``, until all are in.

    x: weighted counts float32 [N, L, E]; pairs: int64 [P, 2]; wanted [P]: the pairs' distances in decode. rho: Spearman
    correlation of ``wanted`` and the cosine distances over the layers added. Source: ELDR (arXiv 2607.00466), step 3.
    """
    total = x.shape[1]
    # The cosine over a set of layers needs only sums of per-layer products, so each is computed once.
    dots = pair_dots(x, pairs)
    squares = np.einsum("nle,nle->ln", x, x, dtype=np.float64)
    target = _standardised_ranks(np.asarray(wanted, np.float64))
    layers: list[int] = []
    rhos: list[float] = []
    dot, square, distance = np.zeros(len(pairs)), np.zeros(len(x)), np.empty(len(pairs))
    rest = list(range(total))
    while rest:
        found = []
        for layer in rest:
            _distances(dot, dots[layer], square, squares[layer], pairs, distance)
            found.append(_rank_correlation(distance, distance.argsort(), target))
        best = int(np.argmax(found))
        if not beyond_peak and rhos and found[best] <= rhos[-1] + _GAIN:
            break
        layer = rest.pop(best)
        layers.append(layer)
        rhos.append(float(found[best]))
        dot, square = dot + dots[layer], square + squares[layer]
    return Trace(tuple(layers), tuple(rhos))


def pair_dots(x: NDArray[np.float32], pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """Dot products, layer by layer, of pairs int64 [P, 2] of the rows of x [N, L, E]: float64 [L, P]."""
    dots: NDArray[np.float64] = _pair_dots(np.ascontiguousarray(x, np.float32), np.ascontiguousarray(pairs))
    return dots


def _standardised_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    ranks = rankdata(values)
    centred: NDArray[np.float64] = ranks - ranks.mean()
    deviation = centred.std()
    return centred / deviation if deviation > 0 else centred


@njit(cache=True, nogil=True, fastmath=True)
def _pair_dots(x: Any, pairs: Any) -> Any:
    layers, experts = x.shape[1], x.shape[2]
    out = np.empty((layers, pairs.shape[0]))
    for p in range(pairs.shape[0]):
        a, b = x[pairs[p, 0]], x[pairs[p, 1]]
        for layer in range(layers):
            dot = np.float32(0)
            for e in range(experts):
                dot += a[layer, e] * b[layer, e]
            out[layer, p] = dot
    return out


@njit(cache=True, nogil=True)
def _distances(dot: Any, more: Any, square: Any, more_square: Any, pairs: Any, out: Any) -> None:
    for p in range(pairs.shape[0]):
        i, j = pairs[p, 0], pairs[p, 1]
        scale = np.sqrt((square[i] + more_square[i]) * (square[j] + more_square[j]))
        out[p] = 1 - (dot[p] + more[p]) / scale if scale > 0 else 1.0


@njit(cache=True, nogil=True)
def _rank_correlation(values: Any, order: Any, target: Any) -> Any:
    """Spearman's rho of values [P] and standardised ranks [P]; ties get their mean rank. order: values.argsort()."""
    n = values.size
    total = square = 0.0
    start = 0
    while start < n:
        stop = start + 1
        while stop < n and values[order[stop]] == values[order[start]]:
            stop += 1
        rank = 0.5 * (start + stop - 1) - 0.5 * (n - 1)
        for i in range(start, stop):
            total += rank * target[order[i]]
            square += rank * rank
        start = stop
    return total / np.sqrt(square * n) if square > 0 else 0.0
