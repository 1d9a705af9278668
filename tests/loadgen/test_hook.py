"""The emulated hook's frames: a signature summed from them equals a cold prefill's, whatever was cached."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from eldrd.signatures import wire
from loadgen.fleet import EmulatedFleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from eldrd.signatures.geometry import Geometry

ASK_P = {"do_remote_decode": False, "do_remote_prefill": False}


class Daemon:
    """A ROUTER that keeps what the hooks send, as simply as possible."""

    def __init__(self) -> None:
        self.socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.geometry: dict[bytes, Geometry] = {}
        self.hellos: list[wire.Hello] = []
        self.rows: dict[int, np.ndarray] = {}
        self.pushed = 0
        self.records: dict[str, tuple[wire.Request, list[int], np.ndarray]] = {}
        self.peer = b""
        self.seqs: list[int] = []
        self.changed = asyncio.Condition()
        self.task = asyncio.create_task(self.receive())

    async def receive(self) -> None:
        while True:
            self.peer, *frames = await self.socket.recv_multipart()
            async with self.changed:
                self.take(wire.decode_header(frames[0]), frames)
                self.changed.notify_all()

    def take(self, header: wire.Header, frames: list[bytes]) -> None:
        if isinstance(header, wire.Hello):
            self.hellos.append(header)
            self.geometry[self.peer] = header.geometry()
            return
        self.seqs.append(header.seq)
        geometry = self.geometry[self.peer]
        if isinstance(header, wire.Blocks):
            self.pushed += header.n
            rows = wire.counts(frames, header.n, header.dtype, geometry)
            self.rows.update(zip(wire.hashes(frames, header.n).tolist(), rows.astype(int), strict=True))
        elif isinstance(header, wire.Request):
            tail = wire.counts(frames, 1, header.dtype, geometry)[0].astype(int)
            self.records[header.id] = header, wire.hashes(frames, header.blocks).tolist(), tail

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(holds)

    async def signature(self, eldr_id: str) -> np.ndarray:
        await self.until(lambda: eldr_id in self.records)
        _, hashes, tail = self.records[eldr_id]
        return tail + sum((self.rows[h] for h in hashes), np.zeros_like(tail))

    async def send(self, header: wire.Header, *arrays: np.ndarray) -> None:
        await self.socket.send_multipart([self.peer, *wire.encode(header, *arrays)])


@pytest_asyncio.fixture
async def daemon():
    d = Daemon()
    yield d
    d.task.cancel()
    d.socket.close(0)


@pytest_asyncio.fixture
async def fleet(daemon, fast):
    async with EmulatedFleet(dataclasses.replace(fast, hook=f"tcp://127.0.0.1:{daemon.port}")) as fleet:
        yield fleet


async def ask(http, fleet, prompt: list[int], eldr_id: str | None) -> None:
    params = ASK_P | ({"eldr_id": eldr_id} if eldr_id else {})
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
    async with http.post(fleet.prefill[0].url + "/v1/completions", json=body) as r:
        assert r.status == 200


@pytest.mark.parametrize("repeat", [1, 3])
async def test_signature_equals_cold_counts(fleet, daemon, http, repeat):
    rng = np.random.default_rng(repeat)
    shared = rng.integers(1, 2048, 200).tolist()
    prompts = [
        shared[:1],
        shared[:31],
        shared[:32],
        shared[:64],
        shared[:64],
        shared[:33],
        shared,
        shared[:100] + [5] * 60,
    ]
    for i, prompt in enumerate(prompts * repeat):
        await ask(http, fleet, prompt, f"r{i}")
        cold = fleet.model.counts(np.array(prompt, np.int32))
        assert (await daemon.signature(f"r{i}") == cold).all()
        header = daemon.records[f"r{i}"][0]
        assert (header.tokens, header.blocks, header.tail) == (len(prompt), len(prompt) // 32, len(prompt) % 32)
        assert not header.partial
    assert daemon.seqs == sorted(set(daemon.seqs)) == list(range(1, len(daemon.seqs) + 1))


async def test_only_computed_blocks_are_pushed(fleet, daemon, http):
    prompt = list(range(1, 101))
    pushed = []
    for i, p in enumerate((prompt, prompt, prompt[:96], prompt[:64] + [7] * 40)):
        await ask(http, fleet, p, f"r{i}")
        await daemon.signature(f"r{i}")
        pushed.append(daemon.pushed)
    # Cold: 3. Cached: 0. Aligned and fully cached: its last block is computed again. Shared prefix: 1 new block.
    assert pushed == [3, 3, 4, 5]


async def test_hello_on_connect_and_when_asked_who(fleet, daemon, http):
    await ask(http, fleet, [1, 2, 3], "r0")
    await daemon.signature("r0")
    hello = daemon.hellos[0]
    assert (hello.worker, hello.phase, hello.model) == ("p0", "prefill", "emulated-moe")
    assert hello.geometry().shape == (2, 16)
    before = len(daemon.hellos)
    await daemon.send(wire.Who(v=wire.VERSION))
    await daemon.until(lambda: len(daemon.hellos) > before)


async def test_want_brings_rows_again(fleet, daemon, http):
    prompt = np.arange(1, 101, dtype=np.int32)
    await ask(http, fleet, prompt.tolist(), "r0")
    cold = await daemon.signature("r0")
    hashes = list(daemon.rows)
    daemon.rows.clear()
    await daemon.send(wire.Want(v=wire.VERSION, n=len(hashes) + 1), np.array([*hashes, 12345], wire.HASH))
    await daemon.until(lambda: len(daemon.rows) == len(hashes))
    assert (await daemon.signature("r0") == cold).all()
    assert fleet.prefill[0].engine.hook.lost_rows == 1


async def test_answer_acknowledges_beside_the_hand_off(fleet, daemon, http):
    for hand_off in (True, False):
        params = {"do_remote_decode": hand_off, "eldr_id": "r0"}
        body = {"prompt": list(range(1, 101)), "max_tokens": 1, "kv_transfer_params": params}
        async with http.post(fleet.prefill[0].url + "/v1/completions", json=body) as r:
            answered = (await r.json())["kv_transfer_params"]
        assert (answered or {}).get("eldr") == ({"id": "r0", "blocks": 3} if hand_off else None)


async def test_request_without_eldr_id_pushes_blocks_only(fleet, daemon, http):
    await ask(http, fleet, list(range(1, 41)), None)
    await daemon.until(lambda: daemon.pushed == 1)
    await asyncio.sleep(0.02)
    assert daemon.records == {}
