"""The rank map's file: what is read and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from eldrd.routing.ranks import load_ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_reads_ranks_of_any_integer_type(tmp_path: Path) -> None:
    ranks = np.array([[0, 1, 1, 0], [1, 1, 0, 0]], np.uint8)
    save_file({"ranks": ranks}, tmp_path / "r")
    assert load_ranks(tmp_path / "r").tolist() == ranks.tolist()
    assert load_ranks(tmp_path / "r").dtype == np.int32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"rank": np.zeros((1, 2), np.int32)}, "no tensor named ranks"),
        ({"ranks": np.zeros((1, 2), np.float32)}, "expected integers"),
        ({"ranks": np.zeros(2, np.int32)}, "expected integers"),
        ({"ranks": np.array([[0, 2]], np.int32)}, "none left out"),
        ({"ranks": np.array([[0, -1]], np.int32)}, "none left out"),
    ],
)
def test_refusals_name_the_file(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    save_file(arrays, tmp_path / "r")
    with pytest.raises(ValueError, match=message) as e:
        load_ranks(tmp_path / "r")
    assert str(tmp_path / "r") in str(e.value)
    (tmp_path / "r").write_bytes(b"x")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_ranks(tmp_path / "r")
    with pytest.raises(ValueError, match=r"not a readable safetensors file: .*Is a directory"):
        load_ranks(tmp_path)
