"""The shape of a model's expert counts: which MoE layers, how many experts, which hash block. No arrays, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@lru_cache(maxsize=64)
def _one(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The first of equal tuples."""
    return layers


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one hook counts.

    layers: ids of the MoE layers in row order, length L (dense layers leave gaps); experts: routed experts a layer, E;
    top_k: experts chosen a token; block_size: tokens of one hash block; fingerprint: 64-bit identity of the weights
    and of L, E, k, so that two models never share cache rows; model: the served name; hash_algo: vLLM's
    ``prefix_caching_hash_algo``.
    """

    model: str
    fingerprint: int
    layers: tuple[int, ...]
    experts: int
    top_k: int
    block_size: int
    hash_algo: str = "sha256"

    def __post_init__(self) -> None:
        # Every request's geometry is compared with the partition's: equal layers are then one object.
        object.__setattr__(self, "layers", _one(self.layers))

    @property
    def width(self) -> int:
        """Cells of one row: L * E."""
        return len(self.layers) * self.experts

    @property
    def shape(self) -> tuple[int, int]:
        """(L, E)."""
        return len(self.layers), self.experts
