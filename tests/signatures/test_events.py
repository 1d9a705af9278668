"""vLLM's KV events over real ZMQ: the cache keeps the rows of blocks that a server holds, whatever order things come in."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.signatures import events as module
from eldrd.signatures.cache import SignatureCache
from eldrd.signatures.events import CacheEvents
from eldrd.signatures.geometry import Geometry
from eldrd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

GEOMETRY = Geometry("m", 7, (0, 1), 4, 2, 8)
pack = msgspec.msgpack.encode


def stored(*hashes: int | bytes) -> dict[str, Any]:
    """As vLLM 0.32 publishes it, fields that eldrd has no use for included."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None, "token_ids": [1, 2, 3],
        "block_size": 8, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None, ["salt"]],
        "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip


def removed(*hashes: int | bytes) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


def frames(seq: int, *events: Any) -> list[bytes]:
    return [b"", seq.to_bytes(8, "big"), pack([1.5, list(events), 0])]


class Server:
    """A prefill server's PUB socket."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.endpoint, self.seq = endpoint, 0
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)

    async def subscribed(self) -> None:
        while not self.socket.poll(0):  # noqa: ASYNC110, nothing tells
            await asyncio.sleep(0.005)
        self.socket.recv()

    def say(self, *events: Any) -> None:
        self.socket.send_multipart(frames(self.seq, *events))
        self.seq += 1


class Bench:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.cache = SignatureCache(1 << 20)
        self.geometry: Geometry | None = GEOMETRY
        self.events = CacheEvents(self.cache, self.metrics, lambda: self.geometry)
        self.context: zmq.Context[Any] = zmq.Context()

    def rows(self, *hashes: int) -> None:
        self.cache.insert(GEOMETRY, np.array(hashes, np.uint64), np.ones((len(hashes), 8), np.uint8))

    def kept(self, *hashes: int) -> list[int]:
        asked = np.array(hashes, np.uint64)
        return sorted(set(hashes) - set(self.cache.lacking(GEOMETRY, asked).tolist()))

    def counted(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("eldrd_kv_events_total", {"kind": kind}) or 0.0

    async def until(self, kind: str, n: float) -> None:
        async with asyncio.timeout(60):
            while self.counted(kind) < n:  # noqa: ASYNC110, nothing tells
                await asyncio.sleep(0.002)

    async def settled(self) -> None:
        """Wait until every removal that has been heard of is done."""
        async with asyncio.timeout(60):
            while self.events._due:  # noqa: ASYNC110, nothing tells
                await asyncio.sleep(0.002)


@pytest.fixture
def delay_s() -> float:
    """How long a removal waits; long where something has to happen meanwhile."""
    return 0.03


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> AsyncIterator[Bench]:
    monkeypatch.setattr(module, "DELAY_S", delay_s)
    bench = Bench()
    yield bench
    bench.events.close()
    bench.context.destroy(0)


async def server(bench: Bench, tmp_path: Path, name: str = "p0") -> Server:
    s = Server(bench.context, f"ipc://{tmp_path}/{name}")
    bench.events.watch({**{n: o.endpoint for n, o in bench.events._servers.items()}, name: s.endpoint})
    await s.subscribed()
    return s


@pytest.mark.parametrize("delay_s", [1.0])
async def test_removed_blocks_lose_their_rows(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    top = 2**64 - 1
    bench.rows(1, 2, top)
    p.say(stored(1, 2, top))
    p.say(removed(1), removed(top))
    await bench.until("removed", 2)
    assert bench.kept(1, 2, top) == [1, 2, top]
    await bench.settled()
    assert bench.kept(1, 2, top) == [2]


async def test_whole_hashes_are_known_by_their_low_bits(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    bench.rows(258)
    p.say(stored(b"\x07" * 30 + b"\x01\x02"), removed(b"\x07" * 24 + b"\0" * 6 + b"\x01\x02"))
    await bench.until("removed", 1)
    await bench.settled()
    assert bench.kept(258) == []


@pytest.mark.parametrize("delay_s", [1.0])
async def test_rows_that_come_after_the_removal_go_too(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    p.say(stored(1), removed(1))
    await bench.until("removed", 1)
    bench.rows(1)
    await bench.settled()
    assert bench.kept(1) == []


@pytest.mark.parametrize("delay_s", [1.0])
async def test_a_block_stored_again_keeps_its_row(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    bench.rows(1)
    p.say(stored(1))
    p.say(removed(1))
    p.say(stored(1))
    await bench.until("stored", 2)
    await bench.settled()
    assert bench.kept(1) == [1]


async def test_the_last_copy_at_the_last_server_counts(bench: Bench, tmp_path: Path) -> None:
    p0, p1 = await server(bench, tmp_path), await server(bench, tmp_path, "p1")
    bench.rows(1)
    p0.say(stored(1), stored(1))
    p1.say(stored(1))
    await bench.until("stored", 3)
    for n, p in enumerate((p0, p1, p0)):
        assert bench.kept(1) == [1]
        p.say(removed(1))
        await bench.until("removed", n + 1)
        await bench.settled()
    assert bench.kept(1) == []


async def test_cleared_restarted_and_removed_servers_hold_nothing(bench: Bench, tmp_path: Path) -> None:
    p0, p1 = await server(bench, tmp_path), await server(bench, tmp_path, "p1")
    many = list(range(10, 10_010))
    bench.rows(1, 2, 3, 4, *many)
    p0.say(stored(1, 2, *many))
    p1.say(stored(2, 3))
    await bench.until("stored", len(many) + 4)
    p0.say(CLEARED)
    await bench.until("cleared", 1)
    await bench.settled()
    assert bench.kept(1, 2, 3, 4, *many) == [2, 3, 4]
    p1.seq = 0
    p1.say(stored(3))
    await bench.until("stored", len(many) + 5)
    await bench.settled()
    assert bench.kept(1, 2, 3, 4) == [3, 4]
    bench.events.watch({"p0": p0.endpoint})
    await bench.settled()
    assert bench.kept(3, 4) == [4]


async def test_lost_batches_are_counted_and_harmless(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    bench.rows(1, 2)
    p.seq = 40
    p.say(stored(1))
    p.seq += 2
    p.say(removed(2), removed(1))
    await bench.until("removed", 2)
    assert bench.counted("lost") == 2
    await bench.settled()
    assert bench.kept(1, 2) == []


async def test_events_of_no_known_kind_change_nothing(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    bench.rows(1)
    p.say(stored(1), {"type": "BlockLent", "block_hashes": [1]}, {"type": "BlockRemoved"}, {"type": "BlockRemoved", "block_hashes": ["1"]})  # fmt: skip  # noqa: E501
    for bad in ([b""], [b"", b"", b""], [b"", b"\0" * 8, b"\xc1"], [b"", b"\0" * 8, pack({"ts": 1})]):
        p.socket.send_multipart(bad)
    await bench.until("invalid", 7)
    await bench.settled()
    assert bench.kept(1) == [1]
    assert bench.events.holds(1)


async def test_without_a_hook_there_is_nothing_to_remove(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    bench.geometry = None
    p.say(stored(1), removed(1))
    await bench.until("removed", 1)
    await bench.settled()


async def test_a_burst_is_taken_to_its_end(bench: Bench, tmp_path: Path) -> None:
    p = await server(bench, tmp_path)
    for h in range(1000):
        p.say(stored(h))
    await bench.until("stored", 1000)
    assert bench.events.holds(999)


steps = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "remove", "clear", "row"]),
    st.sampled_from(["p0", "p1"]),
    st.integers(0, 5),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, min_size=1, max_size=40))
def test_any_order_ends_with_the_rows_of_held_blocks(script: list[tuple[str, str, int]]) -> None:
    """Servers with several copies of a block; rows that come before, after or long after what they belong to."""

    async def run(bench: Bench) -> None:
        bench.events.watch({f"p{i}": f"ipc:///nonexistent/{i}" for i in range(2)})
        copies: Counter[tuple[str, int]] = Counter()
        seqs: Counter[str] = Counter()
        late: list[int] = []
        for kind, name, h in script:
            batch = []
            if kind == "store":
                copies[name, h] += 1
                late.append(h)
                batch = [stored(h)]
            elif kind == "remove" and copies[name, h]:
                copies[name, h] -= 1
                batch = [removed(h)]
            elif kind == "clear":
                for key in [k for k in copies if k[0] == name]:
                    del copies[key]
                batch = [CLEARED]
            elif kind == "row" and late:
                bench.rows(late.pop(h % len(late)))
            if batch:
                bench.events._take(bench.events._servers[name], frames(seqs[name], *batch))
                seqs[name] += 1
        for h in late:
            bench.rows(h)
        await bench.settled()
        assert set(bench.kept(*range(6))) == {h for (_, h), n in copies.items() if n}

    async def closed() -> None:
        bench = Bench()
        try:
            await run(bench)
        finally:
            bench.events.close()
            bench.context.term()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DELAY_S", 0.005)
        asyncio.run(closed())
