"""The file that says which expert-parallel rank holds which expert. Nothing is routed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def load_ranks(path: Path) -> NDArray[np.int32]:
    """The tensor ``ranks`` of a safetensors file: integers [L, E], ranks from 0. Raises ValueError naming the file."""
    try:
        # open says why a file cannot be opened; for safetensors there is none.
        with path.open("rb"):
            arrays = load_file(path)
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{path}: not a readable safetensors file: {e}") from None
    ranks = arrays.get("ranks")
    if ranks is None:
        raise ValueError(f"{path}: holds no tensor named ranks")
    if ranks.ndim != 2 or ranks.size == 0 or not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(f"{path}: ranks is {ranks.dtype} {ranks.shape}, expected integers [layers, experts]")
    if np.unique(ranks).tolist() != list(range(int(ranks.max()) + 1)):
        raise ValueError(f"{path}: ranks must be numbers from 0 on, none left out")
    return np.asarray(ranks, np.int32)
