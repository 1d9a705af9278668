"""The identity of weights: the same wherever they lie, another for any other weights, shape or precision."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from eldrd_hook.fingerprint import of_checkpoint, of_name

if TYPE_CHECKING:
    from pathlib import Path

FACTS = ("float32", None, [0, 1], 8, 2)


def checkpoint(folder: Path, weights: np.ndarray, config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    header = json.dumps({"w": {"dtype": "F32", "shape": [len(weights)], "data_offsets": [0, weights.nbytes]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights.tobytes())
    return folder


@pytest.fixture
def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(100_000).astype(np.float32)


def test_place_does_not_matter(tmp_path: Path, weights: np.ndarray) -> None:
    a = checkpoint(tmp_path / "a", weights)
    b = shutil.copytree(a, tmp_path / "elsewhere")
    assert of_checkpoint(a, FACTS) == of_checkpoint(b, FACTS)
    assert 0 <= of_checkpoint(a, FACTS) < 1 << 64


def test_weights_config_and_facts_matter(tmp_path: Path, weights: np.ndarray) -> None:
    a = checkpoint(tmp_path / "a", weights)
    tuned = checkpoint(tmp_path / "tuned", weights + np.float32(1e-3))
    other = checkpoint(tmp_path / "other", weights, '{"rope_theta": 1}')
    marks = {
        of_checkpoint(a, FACTS),
        of_checkpoint(tuned, FACTS),
        of_checkpoint(other, FACTS),
        of_checkpoint(a, ("bfloat16", *FACTS[1:])),
    }
    assert len(marks) == 4


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="safetensors"):
        of_checkpoint(tmp_path, FACTS)


def test_names_differ_by_revision() -> None:
    assert of_name("m", None, FACTS) == of_name("m", "", FACTS) != of_name("m", "abc", FACTS)
