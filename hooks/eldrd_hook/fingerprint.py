"""A 64-bit identity of the weights whose routing is counted, so that two models never share rows. No vLLM, no torch.

A checkpoint is identified by its content, not its place: config.json, and of every safetensors file the header and
samples spread over the data. Servers of one model agree whatever their tensor parallelism, kernels or directory.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SAMPLES = 16
_SAMPLE = 4096


def of_checkpoint(folder: Path, facts: Iterable[object]) -> int:
    """Identity of the safetensors checkpoint in ``folder`` served with ``facts`` (dtype, quantization, L, E, k, ...).

    Raises FileNotFoundError where there is no safetensors file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    digest = _begin(facts)
    config = folder / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as f:
            header = int.from_bytes(f.read(8), "little")
            digest.update(f.read(min(header, size)))
            for i in range(_SAMPLES):
                f.seek(8 + header + (size - 8 - header) * i // _SAMPLES)
                digest.update(f.read(_SAMPLE))
    return int.from_bytes(digest.digest(), "big")


def of_name(name: str, revision: str | None, facts: Iterable[object]) -> int:
    """Identity of a model known by name only, its weights being out of reach."""
    digest = _begin(facts)
    digest.update(f"{name}@{revision or ''}".encode())
    return int.from_bytes(digest.digest(), "big")


def _begin(facts: Iterable[object]) -> hashlib.blake2b:
    return hashlib.blake2b("\n".join(map(str, facts)).encode(), digest_size=8)
