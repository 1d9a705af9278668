"""The relay bench: its native programs, the frames its mock pushes, its bars. No proxy is measured here."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
import orjson
import pytest

from eldrd.signatures.cache import SignatureCache
from eldrd.signatures.receiver import SignatureReceiver
from eldrd.telemetry.metrics import Metrics
from loadgen.bench import frames
from loadgen.bench.proxies import DECODE, BenchError, build
from loadgen.bench.relay import Bar, medians, run_load
from loadgen.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bench")
    build(folder, peers=False)
    return folder


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[SignatureReceiver, int]]:
    taken = SignatureReceiver(SignatureCache(32 << 20), Metrics())
    port = int(taken.start("tcp://127.0.0.1:*").rsplit(":", 1)[1])
    yield taken, port
    taken.close()


async def listening(port: int) -> None:
    for _ in range(6000):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
        else:
            writer.close()
            return
    raise AssertionError("the program does not listen")


class Program:
    """A program that runs while its ``async with`` block does, and listens on ``port``."""

    def __init__(self, *argv: object, port: int) -> None:
        self._process = subprocess.Popen([str(a) for a in argv])
        self._port = port

    async def __aenter__(self) -> None:
        await listening(self._port)

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


async def test_the_mocks_frames_are_exact_signatures(
    programs: Path, tmp_path: Path, receiver: tuple[SignatureReceiver, int]
) -> None:
    prompts = frames.prompts()
    frames.write_frames(prompts, tmp_path / "frames.bin")
    taken, hook = receiver
    port = free_port()
    mock = Program(programs / "mock", "-H", f"{tmp_path / 'frames.bin'}:{hook}", f"{port}:p", port=port)
    async with mock, aiohttp.ClientSession() as session:
        for turn in range(3):
            id_ = f"{turn:032x}"
            taken.expect(id_)
            body = {"model": "mock", "prompt": "a", "kv_transfer_params": {"eldr_id": id_}}
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=orjson.dumps(body)) as answer:
                assert (await answer.json())["kv_transfer_params"]["do_remote_prefill"] is True
            signature = await taken.wait(id_, 5.0)
            assert signature is not None
            assert signature.state == "exact"
            assert signature.geometry == frames.GEOMETRY
            assert np.array_equal(signature.counts, prompts.signatures()[turn].reshape(-1))


def test_prompts_choose_top_k_different_experts() -> None:
    prompts = frames.prompts()
    shaped = prompts.rows.reshape(frames.PROMPTS, frames.BLOCKS, *frames.GEOMETRY.shape)
    assert (shaped.sum(axis=3) == frames.GEOMETRY.block_size * frames.GEOMETRY.top_k).all()
    assert shaped.max() <= frames.GEOMETRY.block_size


def test_a_partition_is_fitted(tmp_path: Path) -> None:
    frames.write_partition(frames.prompts(), DECODE, tmp_path / "p.safetensors")
    assert frames.partition_file.load(tmp_path / "p.safetensors").workers == DECODE


@pytest.mark.parametrize("through_relay", [False, True])
@pytest.mark.parametrize(
    ("arguments", "completed", "chunks"),
    [("-c 4 -n 3", 12, 0), ("-c 3 -n 2 -s -m 5 -i 500", 6, 30), ("-c 2 -n 5 -s -m 2 -R 200", 10, 20)],
)
async def test_load_counts_what_the_mock_sends(
    programs: Path, arguments: str, completed: int, chunks: int, through_relay: bool
) -> None:
    mock, relay = free_port(), free_port()
    async with Program(programs / "mock", f"{mock}:d", port=mock), Program(programs / "relay", relay, mock, port=relay):
        port = relay if through_relay else mock
        figures = await asyncio.to_thread(run_load, programs / "load", port, arguments)
    assert (figures["completed"], figures["errors"], figures["chunks"]) == (completed, 0, chunks)
    assert 0 < figures["first_p50_us"] <= figures["first_p99_us"]


async def test_load_counts_lost_connections_as_errors(programs: Path) -> None:
    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        figures = await asyncio.to_thread(run_load, programs / "load", port, "-c 2 -n 3 -T 5")
    assert (figures["completed"], figures["errors"]) == (0, 6)


def test_no_listener_is_an_error(programs: Path) -> None:
    with pytest.raises(BenchError, match="Connection refused"):
        run_load(programs / "load", free_port(), "-c 1 -n 1")


def test_medians_leave_coalesced_runs_out() -> None:
    runs = [{"single": s, "us_chunk": u, "errors": 1.0} for s, u in ((1.0, 20.0), (0.98, 22.0), (0.5, 10.0))]
    assert medians(runs, streams=True)["us_chunk"] == 21.0
    assert medians(runs, streams=True)["errors"] == 3.0
    assert medians(runs, streams=False)["us_chunk"] == 20.0
    assert medians(runs[2:], streams=True) == {**runs[2], "runs": 1, "clean": 1}


def test_bars() -> None:
    results = {"stream": {"eldrd": {"us_chunk": 16.0}, "vllm-router": {"us_chunk": 20.0}}}
    judged = Bar("stream", "us_chunk", 0.8, "vllm-router").judge(results)
    assert judged is not None
    assert (judged["value"], judged["met"]) == (0.8, True)
    judged = Bar("stream", "us_chunk", 15.9).judge(results)
    assert judged is not None
    assert judged["met"] is False
    assert Bar("stream", "us_chunk", 0.5, "plain-aiohttp").judge(results) is None
    assert Bar("capacity", "errors", 0.0).judge(results) is None
