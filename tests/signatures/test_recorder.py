"""The recorder: what is kept, that files are written off the loop, and that no end of it loses or doubles anything."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from eldrd.signatures import recorder as module
from eldrd.signatures.capture import CaptureWriter, load_capture
from eldrd.signatures.geometry import Geometry
from eldrd.signatures.receiver import Decoded, Signature
from eldrd.signatures.recorder import Recorder
from eldrd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

GEOMETRY = Geometry("m", 7, (0, 1), 4, 2, 8)


def signature(n: int, state: str = "exact", geometry: Geometry = GEOMETRY) -> Signature:
    return Signature(state, np.full(geometry.width, n, np.int32), n, geometry)


def counted(metrics: Metrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("eldrd_captured_total", {"outcome": outcome}) or 0.0


async def test_what_was_added_is_read(tmp_path: Path) -> None:
    metrics = Metrics()
    recorder = Recorder(str(tmp_path / "c"), 1 << 20, metrics)
    for i in range(200):
        recorder.add(signature(i), i + 1, "code" if i % 2 else None)
    recorder.add(signature(0, "partial"), 1, None)
    await recorder.close()
    capture = load_capture(tmp_path / "c")
    assert capture.prompt_tokens.tolist() == list(range(200))
    assert capture.output_tokens.tolist() == list(range(1, 201))
    assert capture.labels == ["code" if i % 2 else None for i in range(200)]
    assert np.array_equal(capture.prefill[:, 0, 0], np.arange(200))
    assert counted(metrics, "added") == 200
    assert counted(metrics, "not_exact") == 1


class DecodeHook:
    """Decode counts that come when the test says so."""

    def __init__(self, *, decoding: bool = True) -> None:
        self.decoding = decoding
        self.here: dict[str, Decoded] = {}

    def come(self, eldr_id: str, n: int, geometry: Geometry = GEOMETRY) -> None:
        self.here[eldr_id] = Decoded(np.full(geometry.width, n, np.uint16), n, geometry)

    def take_decoded(self, eldr_id: str) -> Decoded | None:
        return self.here.pop(eldr_id, None)


def named(n: int) -> Signature:
    return Signature("exact", np.full(GEOMETRY.width, n, np.int32), n, GEOMETRY, f"r{n}")


async def test_decode_counts_join_before_and_after_the_end_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, even while others are still awaited; what never comes is left out and counted."""
    monkeypatch.setattr(module, "_DECODED_S", 2.0)
    metrics, hook = Metrics(), DecodeHook()
    recorder = Recorder(str(tmp_path), 1 << 20, metrics, hook)
    hook.come("r0", 100)
    for i in range(4):
        recorder.add(named(i), 7, None)
    await asyncio.sleep(0.05)
    hook.come("r2", 102)
    hook.come("r1", 101)
    await recorder.close()
    capture = load_capture(tmp_path)
    assert capture.decode is not None
    assert sorted(zip(capture.prompt_tokens.tolist(), capture.decode[:, 0, 0].tolist(), strict=True)) == [
        (0, 100),
        (1, 101),
        (2, 102),
    ]
    assert sorted(capture.output_tokens.tolist()) == [101, 102, 103], "the hook's word, not the stream's"
    assert (counted(metrics, "added"), counted(metrics, "no_decode")) == (3, 1)
    assert hook.here == {}


async def test_steady_traffic_does_not_hold_back_what_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FLUSH_S", 0.05)
    hook = DecodeHook()
    recorder = Recorder(str(tmp_path), 1 << 20, Metrics(), hook)
    async with asyncio.timeout(60):
        for i in itertools.count():
            if i:
                hook.come(f"r{i - 1}", i)
            recorder.add(named(i), 1, None)
            await asyncio.sleep(0.01)
            if (tmp_path / "index.json").exists() and len(load_capture(tmp_path).labels) > 10:
                hook.come(f"r{i}", i)
                break
    await recorder.close()


async def test_without_a_decode_hook_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DECODED_S", 60)
    hook = DecodeHook(decoding=False)
    recorder = Recorder(str(tmp_path), 1 << 20, Metrics(), hook)
    recorder.add(named(1), 1, None)
    await recorder.flush()
    hook.decoding = True
    hook.come("r2", 2)
    recorder.add(named(2), 1, None)
    await recorder.close()
    capture = load_capture(tmp_path)
    assert capture.decode is None
    assert capture.prompt_tokens.tolist() == [1, 2]


async def test_decode_counts_of_another_model(tmp_path: Path) -> None:
    metrics, hook = Metrics(), DecodeHook()
    recorder = Recorder(str(tmp_path), 1 << 20, metrics, hook)
    hook.come("r1", 1, Geometry("m", 7, (0, 1), 8, 2, 8))
    hook.come("r2", 2, Geometry("m", 9, (0, 1), 4, 2, 64))
    recorder.add(named(1), 1, None)
    recorder.add(named(2), 1, None)
    await recorder.close()
    assert load_capture(tmp_path).prompt_tokens.tolist() == [2]
    assert counted(metrics, "no_decode") == 1


async def test_nothing_added_makes_no_directory(tmp_path: Path) -> None:
    await Recorder(str(tmp_path / "c"), 1 << 20, Metrics()).close()
    assert not (tmp_path / "c").exists()


async def test_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLUSH_S", 0.02)
    recorder = Recorder(str(tmp_path / "c"), 1 << 20, Metrics())
    for n in (1, 2):
        recorder.add(signature(n), 1, None)
        async with asyncio.timeout(60):
            while not (tmp_path / "c" / "index.json").exists() or len(load_capture(tmp_path / "c").labels) < n:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await recorder.close()


async def test_full(tmp_path: Path) -> None:
    metrics = Metrics()
    recorder = Recorder(str(tmp_path / "c"), 1 << 10, metrics)
    for i in range(500):
        recorder.add(signature(i), 1, None)
    await recorder.close()
    assert counted(metrics, "full") > 0
    assert counted(metrics, "added") == len(load_capture(tmp_path / "c").labels)
    assert counted(metrics, "full") + counted(metrics, "added") == 500


async def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    metrics = Metrics()
    (tmp_path / "file").write_text("")
    recorder = Recorder(str(tmp_path / "file" / "c"), 1 << 20, metrics)
    for _ in range(3):
        recorder.add(signature(1), 1, None)
    await recorder.flush()
    recorder.add(signature(1), 1, None)
    await recorder.close()
    assert counted(metrics, "failed") == 4
    assert counted(metrics, "added") == 0


async def test_another_models_directory(tmp_path: Path) -> None:
    metrics = Metrics()
    first = Recorder(str(tmp_path), 1 << 20, Metrics())
    first.add(signature(1), 1, None)
    await first.close()
    second = Recorder(str(tmp_path), 1 << 20, metrics)
    second.add(signature(1, geometry=Geometry("n", 8, (0,), 8, 2, 8)), 1, None)
    await second.close()
    assert counted(metrics, "failed") == 1
    assert len(load_capture(tmp_path).labels) == 1


async def test_one_signature_of_another_geometry(tmp_path: Path) -> None:
    """It is refused; those after it are kept, and every one is counted once."""
    metrics = Metrics()
    recorder = Recorder(str(tmp_path), 1 << 20, metrics)
    recorder.add(signature(1), 1, None)
    recorder.add(signature(2, geometry=Geometry("n", 8, (0,), 16, 2, 8)), 1, None)
    recorder.add(signature(3), 1, None)
    await recorder.close()
    assert sum(counted(metrics, k) for k in ("added", "failed", "full")) == 3
    assert load_capture(tmp_path).prompt_tokens.tolist() == [1, 3]


class Gate:
    """Holds the capture's writes in their thread until opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        write = CaptureWriter.write

        def held(writer: CaptureWriter, shard: Any) -> None:
            self.entered.set()
            assert self.open.wait(60)
            write(writer, shard)

        monkeypatch.setattr(CaptureWriter, "write", held)


async def test_closed_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    metrics = Metrics()
    recorder = Recorder(str(tmp_path), 1 << 24, metrics)
    for i in range(300):
        recorder.add(signature(i), 1, None)
    await asyncio.to_thread(gate.entered.wait, 60)
    closing = asyncio.create_task(recorder.close())
    await asyncio.sleep(0.01)
    gate.open.set()
    await closing
    assert load_capture(tmp_path).prompt_tokens.tolist() == list(range(300))
    assert counted(metrics, "added") == 300


async def test_added_while_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload closes one capture while answers still end: nothing may be written once close has returned."""
    gate = Gate(monkeypatch)
    metrics = Metrics()
    recorder = Recorder(str(tmp_path), 1 << 24, metrics)
    recorder.add(signature(1), 1, None)
    await asyncio.to_thread(gate.entered.wait, 60)
    closing = asyncio.create_task(recorder.close())
    await asyncio.sleep(0.01)
    recorder.add(signature(2), 1, None)
    gate.open.set()
    await closing
    recorder.add(signature(3), 1, None)
    before = sorted(p.name for p in tmp_path.iterdir())  # noqa: ASYNC240
    await asyncio.sleep(0.05)
    assert sorted(p.name for p in tmp_path.iterdir()) == before  # noqa: ASYNC240
    assert sum(counted(metrics, k) for k in ("added", "failed")) == 3
    assert len(load_capture(tmp_path).labels) == counted(metrics, "added")
