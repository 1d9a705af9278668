"""Captures: what is added comes back, whatever happens between; broken ones are named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from eldrd.signatures.capture import CaptureError, CaptureWriter, load_capture, write_atomic
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

GEOMETRY = Geometry("m", 2**64 - 3, (0, 2), 4, 2, 16)
BIG = 1 << 20


def counts(n: int, top: int = 100, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, top, (n, *GEOMETRY.shape), np.int32)


def test_round_trip_over_several_shards(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c", GEOMETRY, BIG, shard_requests=3)
    rows = counts(8)
    for i, row in enumerate(rows):
        assert writer.add(row.reshape(-1), 10 + i, 20 + i, None if i % 2 else f"ä{i}")
    written = 0
    while shard := writer.take_full_shard():
        writer.write(shard)
        written += 1
    assert written == 2
    assert len(load_capture(tmp_path / "c").labels) == 6
    writer.flush()
    capture = load_capture(tmp_path / "c")
    assert capture.geometry == GEOMETRY
    assert capture.prefill.dtype == np.int32
    assert capture.prefill.tolist() == rows.tolist()
    assert capture.prompt_tokens.tolist() == list(range(10, 18))
    assert capture.output_tokens.tolist() == list(range(20, 28))
    assert capture.labels == ["ä0", None, "ä2", None, "ä4", None, "ä6", None]
    assert capture.decode is None
    assert writer.take_shard() is None
    assert not list((tmp_path / "c").glob("*.tmp"))


def test_counts_are_copied(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, GEOMETRY, BIG)
    row = counts(1)[0]
    expected = row.tolist()
    writer.add(row, 1, 1)
    row[:] = 0
    writer.flush()
    assert load_capture(tmp_path).prefill[0].tolist() == expected


def test_counts_beyond_uint16_and_decode_counts(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, GEOMETRY, BIG)
    rows, decode = counts(4, 200_000), counts(4, 70_000, seed=1)
    for row, d in zip(rows, decode, strict=True):
        writer.add(row, 1, 1, decode=d)
    with pytest.raises(ValueError, match="with every request or with none"):
        writer.add(rows[0], 1, 1)
    writer.flush()
    capture = load_capture(tmp_path)
    assert capture.prefill.tolist() == rows.tolist()
    assert capture.decode is not None
    assert capture.decode.tolist() == decode.tolist()


def test_decode_is_none_unless_all_have_it(tmp_path: Path) -> None:
    for decode in (counts(1)[0], None):
        writer = CaptureWriter(tmp_path, GEOMETRY, BIG)
        writer.add(counts(1)[0], 1, 1, decode=decode)
        writer.flush()
    capture = load_capture(tmp_path)
    assert capture.decode is None
    assert len(capture.labels) == 2


def test_continues_a_capture_and_stops_at_max_bytes(tmp_path: Path) -> None:
    row_bytes = GEOMETRY.width * 2 + 8
    first = CaptureWriter(tmp_path, GEOMETRY, BIG, shard_requests=2)
    for row in counts(3):
        assert first.add(row, 1, 1)
    first.flush()
    on_disk = sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    second = CaptureWriter(tmp_path, GEOMETRY, on_disk + 3 * row_bytes, shard_requests=2)
    assert second.requests == 3
    added = [second.add(row, 1, 1) for row in counts(5, seed=1)]
    assert added == [True, True, True, False, False]
    assert second.requests == 6
    second.flush()
    capture = load_capture(tmp_path)
    assert capture.prefill.tolist() == [*counts(3).tolist(), *counts(5, seed=1)[:3].tolist()]


def test_one_wide_row_too_many_leaves_the_shard_narrow(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, GEOMETRY, 2 * (GEOMETRY.width * 2 + 8))
    assert writer.add(counts(1)[0], 1, 1)
    assert not writer.add(counts(1)[0] + 70_000, 1, 1)
    assert writer.add(counts(1)[0], 1, 1)
    writer.flush()
    assert load_capture(tmp_path).prefill.shape[0] == 2


def test_an_orphaned_shard_is_written_over(tmp_path: Path) -> None:
    """As after a crash between a shard and its index entry."""
    (tmp_path / "shard-00000.safetensors").write_bytes(b"junk")
    writer = CaptureWriter(tmp_path, GEOMETRY, BIG)
    writer.add(counts(1)[0], 1, 1)
    writer.flush()
    assert load_capture(tmp_path).prefill.tolist() == counts(1).tolist()


def test_another_geometry_is_refused(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, GEOMETRY, BIG)
    writer.add(counts(1)[0], 1, 1)
    writer.flush()
    with pytest.raises(CaptureError, match=r"captures another model: experts is 4 there and 8 here"):
        CaptureWriter(tmp_path, replace(GEOMETRY, experts=8), BIG)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "index.json").unlink(), r"index\.json: .*No such file"),
        (lambda d: (d / "index.json").write_text("{"), r"index\.json: "),
        (lambda d: edit_index(d, version=2), r"index\.json: eldrd-capture version 2, expected eldrd-capture version 1"),
        (lambda d: edit_index(d, shards=[]), r"index\.json: the capture is empty"),
        (lambda d: edit_index(d, shards=[{"file": "../x", "requests": 1}]), r"'\.\./x' is not a plain file name"),
        (lambda d: edit_index(d, shards=[{"file": "none", "requests": 1}]), r"none: "),
        (lambda d: edit_index(d, shards=[{"file": SHARD, "requests": 3}]), r"00000\.safetensors: prefill is uint16"),
        (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-5]), r"00000\.safetensors: "),
        (lambda d: (d / SHARD).write_bytes(b""), r"00000\.safetensors: "),
        (lambda d: (d / SHARD).unlink() or (d / SHARD).mkdir(), r"00000\.safetensors: .*Is a directory"),
    ],
)
def test_broken_captures_are_named(tmp_path: Path, damage: object, message: str) -> None:
    writer = CaptureWriter(tmp_path, GEOMETRY, BIG)
    for row in counts(2):
        writer.add(row, 1, 1)
    writer.flush()
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(CaptureError, match=message):
        load_capture(tmp_path)


SHARD = "shard-00000.safetensors"


def edit_index(directory: Path, **changes: object) -> None:
    path = directory / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
