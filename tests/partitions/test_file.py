"""Partition files: what is saved comes back, what is broken is named, what does not fit the fleet is listed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from eldrd.partitions.file import Partition, PartitionError, Placement, load, mismatches, save
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GEOMETRY = Geometry("m", 2**64 - 1, (1, 2, 4), 4, 2, 16)


def partition() -> Partition:
    centroids = np.random.default_rng(0).random((2, 8)).astype(np.float32)
    return Partition(
        centroids=centroids / np.linalg.norm(centroids, axis=1, keepdims=True),
        idf=np.arange(12, dtype=np.float32).reshape(3, 4),
        layers=np.array([0, 2], np.int32),
        workers=("d0", "d1"),
        geometry=GEOMETRY,
        tau=0.1,
        requests=7,
        rho=None,
        cluster_sizes=(4, 3),
        created="2026-07-01T00:00:00+00:00",
    )


@pytest.mark.parametrize("rho", [None, 0.5])
def test_round_trip(tmp_path: Path, rho: float | None) -> None:
    original = replace(partition(), rho=rho)
    save(original, tmp_path / "p")
    loaded = load(tmp_path / "p")
    for name in Partition.__dataclass_fields__:
        a, b = getattr(original, name), getattr(loaded, name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
        else:
            assert (a, type(a)) == (b, type(b))
    assert loaded.fingerprint == 2**64 - 1


def test_round_trip_of_a_placement(tmp_path: Path) -> None:
    placement = Placement(2, SEATS[:, :, ::-1].copy(), 1.5, 1.25)
    save(replace(partition(), placement=placement), tmp_path / "p")
    loaded = load(tmp_path / "p").placement
    assert loaded is not None
    assert loaded.experts.tolist() == placement.experts.tolist()
    assert (loaded.ranks, loaded.balance_before, loaded.balance_after) == (2, 1.5, 1.25)


def changed(**arrays: Any) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda a, _: a.update(arrays)


def meta(**values: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda _, m: m.update(values)


def placed(entry: str, experts: np.ndarray) -> Callable[[dict[str, Any], dict[str, str]], None]:
    def damage(arrays: dict[str, Any], metadata: dict[str, str]) -> None:
        arrays["placement"], metadata["placement"] = experts, entry

    return damage


NAN = np.full((2, 8), np.nan, np.float32)
SEATS = np.tile(np.arange(4, dtype=np.int32), (2, 3, 1))
PLACED = '{"ranks":2,"balance_before":1.5,"balance_after":1.1}'
DAMAGES: list[tuple[Callable[[dict[str, Any], dict[str, str]], Any], str]] = [
    (lambda a, _: a.pop("idf"), "idf is missing"),
    (lambda _, m: m.pop("tau"), "tau is missing"),
    (lambda _, m: m.clear(), "format is None version None, expected eldrd-partition version 1"),
    (meta(version="2"), "format is eldrd-partition version 2"),
    (meta(tau='"x"'), "tau: "),
    (meta(tau="7"), "tau is 7"),
    (meta(rho="-3"), "rho is -3"),
    (meta(geometry="{}"), "geometry: "),
    (meta(workers="["), "workers: "),
    (meta(workers='["d0","d0"]'), "workers must be unique"),
    (meta(workers='["d0",""]'), "workers must be unique"),
    (meta(workers="[]"), "workers must be unique names, at least one"),
    (meta(workers='["d0","d1","d2"]'), r"centroids have shape \(2, 8\), expected \(3, 8\)"),
    (meta(placement=PLACED), "placement is missing"),
    (placed('{"ranks":2}', SEATS), "placement: "),
    (placed(PLACED, SEATS.astype(np.int64)), "placement is int64, expected int32"),
    (placed(PLACED.replace("2", "3", 1), SEATS), "placement is for 3 ranks, which do not divide 4 experts"),
    (placed(PLACED, SEATS[:1]), r"placement has shape \(1, 3, 4\), expected \(2, 3, 4\)"),
    (placed(PLACED, SEATS * 0), "placement must hold every expert once"),
    (meta(cluster_sizes="[7]"), "cluster_sizes must be 2 sizes"),
    (meta(cluster_sizes="[]"), "cluster_sizes must be 2 sizes"),
    (meta(cluster_sizes="[7,1]"), r"cluster_sizes must be 2 sizes that sum to requests \(7\)"),
    (changed(centroids=NAN), "centroids must be finite"),
    (changed(centroids=np.ones((2, 8), np.float32)), "centroids must have unit rows"),
    (changed(centroids=np.zeros((2, 8), np.float32)), "centroids must have unit rows"),
    (changed(centroids=np.ones((2, 8))), "centroids is float64, expected float32"),
    (changed(centroids=np.ones(8, np.float32)), "centroids have shape"),
    (changed(idf=np.ones((4, 3), np.float32)), r"idf has shape \(4, 3\), expected \(3, 4\)"),
    (changed(idf=-np.ones((3, 4), np.float32)), "idf must be finite and not negative"),
    (changed(idf=np.full((3, 4), np.inf, np.float32)), "idf must be finite"),
    (changed(layers=np.array([0, 3], np.int32)), r"layers must ascend within 0\.\.2"),
    (changed(layers=np.array([-1, 1], np.int32)), "layers must ascend"),
    (changed(layers=np.array([2, 0], np.int32)), "layers must ascend"),
    (changed(layers=np.array([1, 1], np.int32)), "layers must ascend"),
    (changed(layers=np.array([], np.int32)), "layers have shape"),
    (changed(layers=np.array(1, np.int32)), "layers have shape"),
    (changed(layers=np.array([0, 2])), "layers is int64, expected int32"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_broken_files_are_named(
    tmp_path: Path, damage: Callable[[dict[str, Any], dict[str, str]], Any], message: str
) -> None:
    path = tmp_path / "p.safetensors"
    save(partition(), path)
    with safe_open(path, "numpy") as f:
        arrays = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118, safe_open is no mapping
        metadata = dict(f.metadata())
    damage(arrays, metadata)
    save_file(arrays, path, metadata)
    with pytest.raises(PartitionError, match=rf"p\.safetensors: .*{message}"):
        load(path)


def test_truncated_missing_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "p"
    with pytest.raises(PartitionError, match="p: not a readable partition file"):
        load(path)
    save(partition(), path)
    content = path.read_bytes()
    for size in (0, 7, 100, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(PartitionError, match="p: not a readable partition file"):
            load(path)
    with pytest.raises(PartitionError, match=r"not a readable partition file: .*Is a directory"):
        load(tmp_path)


def test_save_refuses_what_load_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="tau is -1"):
        save(replace(partition(), tau=-1), tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_mismatches() -> None:
    p = partition()
    assert mismatches(p, ["d1", "d0"], None) == []
    assert mismatches(p, ["d1", "d0"], replace(GEOMETRY, model="alias", block_size=32)) == []
    assert mismatches(p, ["d0", "x", "y"], None) == [
        "the partition has workers the fleet lacks: d1",
        "the fleet has workers the partition lacks: x, y",
    ]
    other = replace(GEOMETRY, layers=(0, 1, 2), top_k=4, fingerprint=5)
    found = mismatches(p, ["d0", "d1"], other)
    assert len(found) == 3
    assert "3 MoE layers x 4 experts" in found[0]
    assert "top-2 routing, the model uses top-4" in found[1]
    assert "0000000000000005" in found[2]
