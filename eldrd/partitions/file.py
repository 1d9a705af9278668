"""The partition file: what a fit produced, how it is stored and checked. No fitting, no scoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from eldrd.signatures.capture import write_atomic
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FORMAT: Final = "eldrd-partition"
VERSION: Final = "1"

_ARRAYS: Final = {"centroids": np.dtype("f4"), "idf": np.dtype("f4"), "layers": np.dtype("i4")}
# Metadata of a safetensors file are strings; these hold JSON of the type given.
_METADATA: Final[dict[str, Any]] = {
    "geometry": Geometry,
    "workers": tuple[str, ...],
    "tau": float,
    "requests": int,
    "rho": float | None,
    "cluster_sizes": tuple[int, ...],
    "created": str,
}


# Optional: the array ``placement`` and this in the metadata.
_PLACEMENT: Final = "placement"


class _PlacementEntry(msgspec.Struct, frozen=True):
    ranks: int
    balance_before: float
    balance_after: float


class PartitionError(ValueError):
    """A partition that cannot be used; the message names the file and the field."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Experts of each worker's layers, rank by rank, for expert parallelism.

    ranks: R, which divides E; experts: int32 [K, L, E], row k, l holds the expert ids of rank 0's E / R seats, then of
    rank 1's and so on; balance_before, balance_after: active experts of the most loaded rank over the mean rank's, for
    consecutive experts and for this placement, as the fit predicts it.
    """

    ranks: int
    experts: NDArray[np.int32]
    balance_before: float
    balance_after: float


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One centroid per decode worker, and how signatures are made to fit them.

    centroids: float32 [K, D] unit rows, D = S * E; idf: float32 [L, E]; layers: int32 [S], ascending row positions
    into the geometry's L layers; workers: K names in row order; tau: the locality band the fit was made for;
    requests: how many were clustered; rho: Spearman correlation of signature and decode distances, None where the
    capture has no decode counts; cluster_sizes: requests per worker; created: ISO 8601, UTC; placement: where
    `eldrd fit --ep-ranks` made one.
    """

    centroids: NDArray[np.float32]
    idf: NDArray[np.float32]
    layers: NDArray[np.int32]
    workers: tuple[str, ...]
    geometry: Geometry
    tau: float
    requests: int
    rho: float | None
    cluster_sizes: tuple[int, ...]
    created: str
    placement: Placement | None = None

    @property
    def fingerprint(self) -> int:
        """The model's, see Geometry."""
        return self.geometry.fingerprint


def save(partition: Partition, path: Path) -> None:
    """Write a partition; readers see the old or the new file. Raises PartitionError for one that ``load`` would not
    take, OSError as the disk does."""
    for problem in _problems(partition):
        raise PartitionError(f"{path}: {problem}")
    arrays = {name: np.ascontiguousarray(getattr(partition, name), dtype) for name, dtype in _ARRAYS.items()}
    metadata = {name: msgspec.json.encode(getattr(partition, name)).decode() for name in _METADATA}
    if (placed := partition.placement) is not None:
        arrays[_PLACEMENT] = np.ascontiguousarray(placed.experts, np.int32)
        entry = _PlacementEntry(placed.ranks, placed.balance_before, placed.balance_after)
        metadata[_PLACEMENT] = msgspec.json.encode(entry).decode()
    write_atomic(path, to_safetensors(arrays, {"format": FORMAT, "version": VERSION, **metadata}))


def load(path: Path) -> Partition:
    """Read and check a partition. Raises PartitionError naming file and field for everything that does not fit."""
    fields: dict[str, Any] = {}
    try:
        # open says why a file cannot be opened; for safetensors there is none.
        with path.open("rb"), safe_open(path, "numpy") as f:
            metadata: dict[str, str] = f.metadata() or {}
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                found = f"{metadata.get('format')} version {metadata.get('version')}"
                raise PartitionError(f"{path}: format is {found}, expected {FORMAT} version {VERSION}")
            for name, kind in _METADATA.items():
                fields[name] = _decode(path, name, metadata, kind)
            present = set(f.keys())
            wanted = _ARRAYS | ({_PLACEMENT: np.dtype("i4")} if _PLACEMENT in metadata else {})
            for name, dtype in wanted.items():
                if name not in present:
                    raise PartitionError(f"{path}: {name} is missing")
                array = f.get_tensor(name)
                if array.dtype != dtype:
                    raise PartitionError(f"{path}: {name} is {array.dtype}, expected {dtype}")
                fields[name] = array
            if _PLACEMENT in metadata:
                entry = _decode(path, _PLACEMENT, metadata, _PlacementEntry)
                fields[_PLACEMENT] = Placement(
                    entry.ranks, fields[_PLACEMENT], entry.balance_before, entry.balance_after
                )
    except (OSError, SafetensorError) as e:
        raise PartitionError(f"{path}: not a readable partition file: {e}") from None
    partition = Partition(**fields)
    for problem in _problems(partition):
        raise PartitionError(f"{path}: {problem}")
    return partition


def mismatches(partition: Partition, workers: Sequence[str], geometry: Geometry | None) -> list[str]:
    """What keeps a partition from serving this fleet, a sentence each; empty when it fits.

    workers: the fleet's decode workers in any order; geometry: what the hooks count, None while no hook has said.
    """
    found = []
    if unknown := sorted(set(partition.workers) - set(workers)):
        found.append(f"the partition has workers the fleet lacks: {', '.join(unknown)}")
    if extra := sorted(set(workers) - set(partition.workers)):
        found.append(f"the fleet has workers the partition lacks: {', '.join(extra)}")
    if geometry is not None:
        ours = partition.geometry
        if ours.shape != geometry.shape or ours.layers != geometry.layers:
            found.append(
                f"the partition is for {ours.shape[0]} MoE layers x {ours.experts} experts, "
                f"the model has {geometry.shape[0]} x {geometry.experts} or other layers"
            )
        if ours.top_k != geometry.top_k:
            found.append(f"the partition is for top-{ours.top_k} routing, the model uses top-{geometry.top_k}")
        if ours.fingerprint != geometry.fingerprint:
            found.append(
                f"the partition is for {ours.model} with fingerprint {ours.fingerprint:016x}, "
                f"the model is {geometry.model} with {geometry.fingerprint:016x}"
            )
    return found


def _decode(path: Path, name: str, metadata: dict[str, str], kind: Any) -> Any:
    if name not in metadata:
        raise PartitionError(f"{path}: {name} is missing")
    try:
        return msgspec.json.decode(metadata[name], type=kind)
    except msgspec.DecodeError as e:
        raise PartitionError(f"{path}: {name}: {e}") from None


def _problems(p: Partition) -> Iterator[str]:
    """What is wrong with a partition, field first. Later checks rely on earlier ones: only the first is to be read."""
    layers, experts = p.geometry.shape
    k = len(p.workers)
    if k == 0 or len(set(p.workers)) < k or not all(p.workers):
        yield "workers must be unique names, at least one"
    if p.layers.ndim != 1 or p.layers.size == 0:
        yield f"layers have shape {p.layers.shape}, expected a row of at least one"
    if p.layers[0] < 0 or p.layers[-1] >= layers or np.any(np.diff(p.layers) <= 0):
        yield f"layers must ascend within 0..{layers - 1}"
    if p.idf.shape != (layers, experts):
        yield f"idf has shape {p.idf.shape}, expected {(layers, experts)}"
    if not np.all(np.isfinite(p.idf) & (p.idf >= 0)):
        yield "idf must be finite and not negative"
    if p.centroids.shape != (k, p.layers.size * experts):
        expected = (k, p.layers.size * experts)
        yield f"centroids have shape {p.centroids.shape}, expected {expected} (workers, layers x experts)"
    if not np.all(np.isfinite(p.centroids)):
        yield "centroids must be finite"
    if not np.allclose(np.linalg.norm(p.centroids.astype(np.float64), axis=1), 1, atol=1e-3):
        yield "centroids must have unit rows"
    if not 0 <= p.tau <= 2:
        yield f"tau is {p.tau}, expected 0..2"
    if p.rho is not None and not -1.001 <= p.rho <= 1.001:
        yield f"rho is {p.rho}, expected -1..1"
    if (placed := p.placement) is not None:
        if placed.ranks < 1 or experts % placed.ranks:
            yield f"placement is for {placed.ranks} ranks, which do not divide {experts} experts"
        if placed.experts.shape != (k, layers, experts):
            yield f"placement has shape {placed.experts.shape}, expected {(k, layers, experts)}"
        if np.any(np.sort(placed.experts, axis=2) != np.arange(experts)):
            yield "placement must hold every expert once a worker and layer"
    if len(p.cluster_sizes) != k or min(p.cluster_sizes) < 0 or sum(p.cluster_sizes) != p.requests:
        yield f"cluster_sizes must be {k} sizes that sum to requests ({p.requests})"
