"""The benches of the signature path and of the loop: what they read and how they judge. The works themselves, briefly."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from loadgen.bench import frames, loop, path
from loadgen.bench.lateness import lateness
from loadgen.bench.proxies import BenchError

if TYPE_CHECKING:
    from pathlib import Path


def line(decide_ms: float | None, prefill_ms: float = 0.25, signature: str = "exact") -> dict[str, Any]:
    return {"event": "request", "decide_ms": decide_ms, "prefill_ms": prefill_ms, "signature": signature}


def test_requests_are_the_whole_lines_of_requests() -> None:
    lines = [{"event": "listening"}, line(0.1), {"event": "draining"}, line(0.2)]
    log = b"".join(orjson.dumps(x) + b"\n" for x in lines)
    assert [x["decide_ms"] for x in path.requests(log)] == [0.1, 0.2]
    assert [x["decide_ms"] for x in path.requests(log[:-5])] == [0.1]
    assert path.requests(b"") == path.requests(b'{"event"') == []


def test_the_path_is_the_time_to_the_decision() -> None:
    found = path.figures([line(0.1, 0.3), line(0.5, 0.5), line(0.2, 0.9), line(None), line(0.3, 0.1, "missing")])
    assert (found["requests"], found["undecided"], found["exact"]) == (5, 1, 0.8)
    assert found["decide_p50_ms"] == pytest.approx(0.25)
    assert found["path_p50_ms"] == pytest.approx(0.7)
    assert found["path_max_ms"] == pytest.approx(1.1)
    with pytest.raises(BenchError, match="no request"):
        path.figures([line(None)])


@pytest.mark.parametrize(
    ("lines", "met"),
    [
        ([line(0.5, 0.5)], True),
        ([line(0.5, 0.51)], False),
        ([line(0.1)] * 2 + [line(9.0)], True),
        ([line(0.1), line(0.1, signature="missing")], False),
        ([line(0.1), line(None)], False),
    ],
)
def test_the_bar_of_the_path(lines: list[dict[str, Any]], met: bool) -> None:
    assert path.met(path.figures(lines)) is met


def test_a_log_that_lacks_requests_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "_LOG_S", 0.0)
    (tmp_path / "log").write_bytes(orjson.dumps(line(0.1)) + b"\n")
    with pytest.raises(BenchError, match="1 of 2"):
        path._read(tmp_path / "log", 0, 2)


def test_prompts_have_the_length_asked_for() -> None:
    prompts = frames.prompts(path.BLOCKS, path.TAIL)
    top = frames.GEOMETRY.top_k * len(frames.GEOMETRY.layers)
    assert prompts.tokens == 300
    assert (prompts.signatures().sum(axis=(1, 2)) == 300 * top).all()
    assert (prompts.tails.sum(axis=1) == path.TAIL * top).all()


async def test_a_held_loop_is_late() -> None:
    async def hold() -> None:
        await asyncio.sleep(0.05)
        time.sleep(0.03)  # noqa: ASYNC251, what is to be seen

    found = await loop.watch(0.2, hold())
    assert found["late_max_ms"] > 28
    assert found["held_max_ms"] > 28
    assert found["held_p99_ms"] <= found["held_p999_ms"] <= found["held_max_ms"]
    assert set(found) == set(await lateness(0.01))


async def test_what_the_work_raises_is_raised() -> None:
    async def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await loop.watch(0.01, fail())


def test_the_bar_of_the_loop() -> None:
    held = {"reload": 5.0, "sum_512": 5.01, "alone": 9.0}
    assert loop.held_too_long({k: {"held_max_ms": v, "late_max_ms": 9.0} for k, v in held.items()}) == ["sum_512"]


async def test_frames_evict_and_sums_are_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_FULL", 4 << 20)
    found = await loop.hook_frames(4 << 20, 0.2)
    assert found["evicted"] == found["rows"] > 0
    sums = await loop.sums(256, 0.2)
    assert 0 < sums["sum_p50_ms"] <= sums["sum_max_ms"]


def test_no_prompt_ends_a_stride_where_another_does() -> None:
    hashes = np.arange(8_192, dtype=np.uint64)
    seen: set[int] = set()
    for prompt in loop._never_summed(hashes):
        ends = set(prompt[loop.STRIDE - 1 :: loop.STRIDE].tolist())
        assert not ends & seen
        seen |= ends
