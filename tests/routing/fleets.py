"""Partitions for the tests of policies."""

from __future__ import annotations

import numpy as np

from eldrd.partitions.file import Partition
from eldrd.signatures.geometry import Geometry


def partition(k: int, layers: int = 2, experts: int = 4, seed: int = 0) -> Partition:
    rng = np.random.default_rng(seed)
    centroids = rng.random((k, layers * experts)).astype(np.float32) ** 4
    return Partition(
        centroids=centroids / np.linalg.norm(centroids, axis=1, keepdims=True),
        idf=rng.random((layers, experts), np.float32),
        layers=np.arange(layers, dtype=np.int32),
        workers=tuple(f"d{i}" for i in range(k)),
        geometry=Geometry("m", 1, tuple(range(layers)), experts, 2, 16),
        tau=0.1,
        requests=k,
        rho=None,
        cluster_sizes=(1,) * k,
        created="",
    )
