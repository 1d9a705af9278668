"""The receiver behind a real ZMQ DEALER: what a request's signature is, whatever frames come, do not come, or come late."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import structlog
import uvloop
import zmq
import zmq.asyncio

from eldrd.signatures import receiver as module
from eldrd.signatures import wire
from eldrd.signatures.cache import SignatureCache
from eldrd.signatures.receiver import SignatureReceiver
from eldrd.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from numpy.typing import NDArray

LAYERS, EXPERTS, TOP_K, BLOCK = 2, 4, 2, 8
HELLO = wire.Hello(
    v=1, hook="0", worker="p0", phase="prefill", model="m", fingerprint=7, layers=[0, 1], experts=EXPERTS, top_k=TOP_K,
    block_size=BLOCK, hash_algo="sha256",
)  # fmt: skip


def rows(tokens: list[int], seed: int = 0) -> NDArray[np.uint8]:
    """Counts [n, L * E] of blocks with that many tokens: top_k of the experts for each token and layer."""
    rng = np.random.default_rng(seed)
    out = np.zeros((len(tokens), LAYERS, EXPERTS), np.uint8)
    for i, n in enumerate(tokens):
        for layer in range(LAYERS):
            for _ in range(n):
                out[i, layer, rng.permutation(EXPERTS)[:TOP_K]] += 1
    return out.reshape(len(tokens), -1)


class Hook:
    """One hook's socket; ``seq`` numbers its messages as the real one does."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.seq = 0

    async def send(self, header: wire.Header, *arrays: Any) -> None:
        await self.socket.send_multipart(wire.encode(header, *arrays))

    async def hello(self, **changes: Any) -> None:
        await self.send(msgspec.structs.replace(HELLO, **changes))

    async def blocks(self, hashes: list[int], counts: NDArray[Any], dtype: str = "u1") -> None:
        self.seq += 1
        await self.send(wire.Blocks(1, self.seq, len(hashes), dtype), np.array(hashes, wire.HASH), counts)

    async def request(
        self, id_: str, hashes: list[int], tail: NDArray[Any], tokens: int, *, partial: bool = False, dtype: str = "u1"
    ) -> None:
        self.seq += 1
        header = wire.Request(1, self.seq, id_, tokens, len(hashes), tokens % BLOCK, partial, dtype)
        await self.send(header, np.array(hashes, wire.HASH), tail)

    async def decoded(self, id_: str, counts: NDArray[Any], tokens: int, dtype: str = "u2") -> None:
        self.seq += 1
        await self.send(wire.Decoded(1, self.seq, id_, tokens, dtype), counts.astype(wire.DTYPES[dtype]))

    async def steps(self, steps: int, requests: int, tokens: int, active: int, missed: int = 0) -> None:
        self.seq += 1
        await self.send(wire.Steps(1, self.seq, steps, requests, tokens, active, missed))

    async def receive(self) -> tuple[wire.Header, list[bytes]]:
        frames = await asyncio.wait_for(self.socket.recv_multipart(), 60)
        return wire.decode_header(frames[0]), frames


class Bench:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.cache = SignatureCache(1 << 20)
        self.receiver = SignatureReceiver(self.cache, self.metrics)
        self.context = zmq.asyncio.Context()
        self.endpoint = self.receiver.start("tcp://127.0.0.1:*")
        self.errors: list[dict[str, Any]] = []

    def hook(self) -> Hook:
        return Hook(self.context, self.endpoint)

    def frames(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("eldrd_signature_frames_total", {"kind": kind}) or 0.0

    async def until(self, kind: str, n: float = 1) -> None:
        async with asyncio.timeout(60):
            while self.frames(kind) < n:  # noqa: ASYNC110, nothing tells
                await asyncio.sleep(0.002)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: bench.errors.append(context))
    yield bench
    bench.receiver.close()
    bench.context.destroy(linger=0)
    await asyncio.sleep(0)
    assert bench.errors == []


@pytest.fixture(autouse=True)
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


COUNTS = rows([BLOCK, BLOCK, BLOCK, 5])
TAIL = COUNTS[3]
TOTAL = COUNTS.sum(0, dtype=np.int32)
TOKENS = 3 * BLOCK + 5


async def test_exact(bench: Bench) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.blocks([1, 2, 3], COUNTS[:3])
    await hook.request("r", [1, 2, 3], TAIL, TOKENS)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert (signature.state, signature.tokens) == ("exact", TOKENS)
    assert np.array_equal(signature.counts, TOTAL)
    assert signature.geometry == HELLO.geometry()
    assert bench.receiver.geometry == HELLO.geometry()
    # The next prompt shares two blocks: its rows are there already.
    bench.receiver.expect("s")
    await hook.request("s", [1, 2], TAIL, 2 * BLOCK + 5)
    again = await bench.receiver.wait("s", 60)
    assert again is not None
    assert again.state == "exact"
    assert np.array_equal(again.counts, COUNTS[[0, 1, 3]].sum(0))


async def test_counts_of_sixteen_bits(bench: Bench) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.blocks([1, 2, 3], COUNTS[:3].astype("<u2"), "u2")
    await hook.request("r", [1, 2, 3], TAIL.astype("<u2"), TOKENS, dtype="u2")
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert np.array_equal(signature.counts, TOTAL)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
async def test_decode_counts_are_taken_once(bench: Bench, dtype: str) -> None:
    """From a hook on a decode server whose blocks have another size: it is no other geometry for prompts."""
    prefill, decode = bench.hook(), bench.hook()
    await decode.hello(worker="d0", phase="decode", block_size=64)
    await bench.until("hello")
    assert bench.receiver.geometry is None
    assert bench.receiver.decoding
    await prefill.hello()
    await bench.until("hello", 2)
    assert bench.receiver.geometry == HELLO.geometry()
    assert bench.frames("unlike") == 0
    assert bench.receiver.take_decoded("r") is None
    await decode.decoded("r", TAIL, 5, dtype)
    await bench.until("decoded")
    found = bench.receiver.take_decoded("r")
    assert found is not None
    assert (found.tokens, found.counts.tolist(), found.geometry.block_size) == (5, TAIL.tolist(), 64)
    assert bench.receiver.take_decoded("r") is None


async def test_a_decode_hook_that_went_silent_is_not_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    hook = bench.hook()
    await hook.hello(phase="decode")
    await bench.until("hello")
    now += module._SILENT_S - 0.1
    assert bench.receiver.decoding
    now += 0.2
    assert not bench.receiver.decoding
    await hook.hello(phase="decode")
    await bench.until("hello", 2)
    assert bench.receiver.decoding


async def test_decode_counts_that_do_not_add_up(bench: Bench) -> None:
    hook = bench.hook()
    await hook.hello(phase="both")
    await hook.decoded("r", TAIL, 6)
    await bench.until("invalid")
    assert bench.receiver.take_decoded("r") is None


async def test_decode_counts_that_nobody_takes_are_bounded(bench: Bench) -> None:
    hook = bench.hook()
    await hook.hello(phase="decode")
    for i in range(1100):
        await hook.decoded(f"r{i}", TAIL, 5)
    await bench.until("decoded", 1100)
    assert bench.receiver.take_decoded("r0") is None
    assert bench.receiver.take_decoded("r1099") is not None
    assert len(bench.receiver._decoded) <= 1024


async def test_decode_steps_are_exposed_for_configured_workers(bench: Bench) -> None:
    def exposed(name: str, worker: str) -> float | None:
        return bench.metrics.registry.get_sample_value(f"eldrd_worker_{name}", {"worker": worker})

    layers = len(HELLO.layers)
    bench.metrics.workers = frozenset({"d0", "d1"})
    hooks = {name: bench.hook() for name in ("d0", "stranger")}
    for name, hook in hooks.items():
        await hook.hello(worker=name, phase="decode")
        await hook.steps(10, 40, 60, 10 * layers * 2)
        await hook.steps(30, 160, 180, 10 * layers * 2 + 20 * layers * 3, missed=2)
    await bench.until("steps", 4)
    assert exposed("step_active_experts_count", "d0") == exposed("step_requests_count", "d0") == 30
    assert exposed("step_active_experts_sum", "d0") == 10 * 2 + 20 * 3
    assert (exposed("step_requests_sum", "d0"), exposed("step_tokens_sum", "d0")) == (160, 180)
    assert exposed("steps_missed_total", "d0") == 2
    assert exposed("step_active_experts_count", "d1") is None
    assert exposed("step_active_experts_count", "stranger") is None
    assert bench.receiver.steps.status("stranger") == {
        "count": 30,
        "missed": 2,
        "last_requests": 6.0,
        "last_tokens": 6.0,
        "last_active_experts": 3.0,
    }
    assert bench.receiver.steps.status("d1") is None
    # A hook that starts again counts from 0, as Prometheus expects of a counter; the last window is all it has said.
    await hook.steps(2, 4, 4, 2 * layers * 4)
    await bench.until("steps", 5)
    status = bench.receiver.steps.status("stranger")
    assert status is not None
    assert (status["count"], status["last_active_experts"], status["last_requests"]) == (2, 4.0, 2.0)


async def test_totals_that_no_steps_can_have(bench: Bench) -> None:
    hook = bench.hook()
    await hook.hello(phase="decode")
    layers = len(HELLO.layers)
    least, most = 3 * layers * TOP_K, 3 * layers * EXPERTS
    impossible = [(3, 4, 4, least - 1), (3, 4, 4, most + 1), (3, 2, 4, least), (3, 5, 4, least), (0, 0, 0, 0, -1)]
    for totals in [*impossible, (-1, 0, 0, -layers * TOP_K)]:
        await hook.steps(*totals)
    await bench.until("invalid", 6)
    assert bench.receiver.steps.status(HELLO.worker) is None
    await hook.steps(3, 3, 3, least)
    await hook.steps(3, 3, 3, most)
    await bench.until("steps", 8)
    assert bench.frames("invalid") == 6


async def test_workers_with_steps_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eldrd.signatures.steps._WORKERS", 3)
    for i in range(5):
        hook = bench.hook()
        await hook.hello(worker=f"d{i}", phase="decode")
        await hook.steps(1, 1, 1, len(HELLO.layers) * TOP_K)
        await bench.until("steps", i + 1)
    known = [bench.receiver.steps.status(f"d{i}") is not None for i in range(5)]
    assert known == [False, False, True, True, True]


async def test_a_signature_names_its_request(bench: Bench) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.request("r", [], TAIL, 5)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert signature.eldr_id == "r"


async def test_missing_without_a_record(bench: Bench) -> None:
    bench.receiver.expect("r")
    assert await bench.receiver.wait("r", 0.02) is None
    bench.receiver.forget("r")
    hook = bench.hook()
    await hook.hello()
    await hook.request("r", [], TAIL, 5)
    await bench.until("unasked")


async def test_record_before_the_wait(bench: Bench) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.request("r", [], TAIL, 5)
    assert bench.receiver.ready("r") is None
    await bench.until("request")
    whole = bench.receiver.ready("r")
    signature = await bench.receiver.wait("r", 0.0)
    assert signature is whole
    assert signature is not None
    assert signature.state == "exact"


def test_what_came_in_time_counts_though_the_loop_was_busy() -> None:
    """On the daemon's loop, which runs its timers before it reads."""

    def hold(ours: socket.socket, hook: Hook, frames: list[bytes], until: float) -> None:
        asyncio.get_running_loop().remove_reader(ours)
        ours.close()
        hook.socket.send_multipart(frames)
        time.sleep(max(0.0, until - time.monotonic()))

    async def busy() -> None:
        bench = Bench()
        hook = bench.hook()
        await hook.hello()
        await bench.until("hello")
        for i in range(3):
            bench.receiver.expect(f"r{i}")
            waiting = asyncio.create_task(bench.receiver.wait(f"r{i}", 0.4))
            # Past the limit by as much again, for the frames' way through the peer's thread.
            until = time.monotonic() + 0.8
            await asyncio.sleep(0)
            hook.seq += 1
            header = wire.Request(1, hook.seq, f"r{i}", 5, 0, 5, False, "u1")
            frames = wire.encode(header, np.empty(0, wire.HASH), TAIL)
            # In a callback of a read: after it come the timers.
            ours, theirs = socket.socketpair()
            asyncio.get_running_loop().add_reader(ours, hold, ours, hook, frames, until)
            theirs.send(b"x")
            signature = await waiting
            theirs.close()
            assert signature is not None
            assert signature.state == "exact"
        bench.receiver.close()
        bench.context.destroy(linger=0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(busy())


@pytest.mark.parametrize("rounds", [1, 3])
async def test_a_peer_that_goes_on_with_nonsense_is_named_once(bench: Bench, lines: list[Any], rounds: int) -> None:
    hook = bench.hook()
    await hook.hello()
    for _ in range(rounds):
        await hook.socket.send_multipart([b"\xc1" * 70_000])
    await bench.until("invalid", rounds)
    told = [line for line in lines if line["event"] == "signature_frame_invalid"]
    assert [(line["peer"], line["problem"]) for line in told] == [("127.0.0.1", "a header of 70000 bytes")]


async def test_a_geometry_beyond_any_model_is_refused(bench: Bench) -> None:
    hook = bench.hook()
    await hook.hello(experts=2**62)
    await bench.until("invalid")
    assert bench.receiver.hooks == []


async def test_partial_by_the_hooks_word(bench: Bench) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.request("r", [1, 2], TAIL, TOKENS, partial=True)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert signature.state == "partial"
    assert np.array_equal(signature.counts, TAIL)


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS + 1, 0, -1])
async def test_counts_that_do_not_add_up_are_no_exact_signature(bench: Bench, tokens: int) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.blocks([1, 2, 3], COUNTS[:3])
    await hook.request("r", [1, 2, 3], TAIL, tokens)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert signature.state == "partial"


async def test_want_answered(bench: Bench) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.blocks([2], COUNTS[1:2])
    await hook.request("r", [1, 2, 3], TAIL, TOKENS)
    waiting = asyncio.create_task(bench.receiver.wait("r", 60))
    header, frames = await hook.receive()
    assert isinstance(header, wire.Want)
    assert wire.hashes(frames, header.n).tolist() == [1, 3]
    await hook.blocks([1], COUNTS[:1])
    await hook.blocks([3], COUNTS[2:3])
    signature = await waiting
    assert signature is not None
    assert signature.state == "exact"
    assert np.array_equal(signature.counts, TOTAL)


async def test_want_not_answered(bench: Bench) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello()
    await hook.blocks([2], COUNTS[1:2])
    await hook.request("r", [1, 2, 3], TAIL, TOKENS)
    await bench.until("want")
    assert bench.receiver.ready("r") is None
    signature = await bench.receiver.wait("r", 0.1)
    assert signature is not None
    assert signature.state == "partial"
    assert np.array_equal(signature.counts, COUNTS[[1, 3]].sum(0))
    bench.receiver.forget("r")
    assert not bench.receiver._lacking
    assert not bench.receiver._pending


async def test_who_after_a_restart(bench: Bench) -> None:
    """A hook that was connected before: its frames are not understood until it has said hello again."""
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.request("r", [], TAIL, 5)
    header, _ = await hook.receive()
    assert isinstance(header, wire.Who)
    assert await bench.receiver.wait("r", 0.01) is None
    await hook.hello()
    await hook.request("r", [], TAIL, 5)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert signature.state == "exact"


def garbage() -> list[list[bytes]]:
    """Messages that are none, under a known peer."""
    pack = msgspec.msgpack.encode
    h, two = np.arange(2, dtype="<u8").tobytes(), rows([BLOCK, BLOCK]).tobytes()
    blocks = {"t": "blocks", "v": 1, "seq": 1, "n": 2, "dtype": "u1"}
    request = {
        "t": "request", "v": 1, "seq": 1, "id": "r", "tokens": 5, "blocks": 0, "tail": 5, "partial": False, "dtype": "u1",
    }  # fmt: skip
    hello = {**msgspec.to_builtins(HELLO), "t": "hello", "worker": "evil"}
    return [
        [], [b""], [b"\xff" * 100], [pack([1])], [pack({"t": "blocks"})], [pack({**blocks, "v": 2}), h, two],
        [pack(blocks)], [pack(blocks), h], [pack(blocks), h[:-1], two], [pack(blocks), h, two[:-1]],
        [pack({**blocks, "n": -1}), h, two], [pack({**blocks, "n": 2**63 - 1}), h, two],
        [pack({**blocks, "dtype": "f8"}), h, two],
        # Counts that no block of this size can have.
        [pack({**blocks, "dtype": "u2"}), h, np.full(16, 40_000, "<u2").tobytes()],
        [pack(request)], [pack(request), b"", b""], [pack({**request, "blocks": -1}), b"", two[:8]],
        [pack({**request, "dtype": ""}), b"", two[:8]],
        [pack({"t": "want", "v": 1, "n": 0}), b""], [pack({"t": "who", "v": 1})],
        [pack({**hello, "layers": []})], [pack({**hello, "experts": 0})], [pack({**hello, "experts": -4})],
        [pack({**hello, "top_k": 0})], [pack({**hello, "top_k": 9})], [pack({**hello, "block_size": 0})],
        [pack({**hello, "layers": ["a"]})], [pack({**hello, "fingerprint": "x"})],
    ]  # fmt: skip


async def test_garbage_changes_nothing(bench: Bench, lines: list[Any]) -> None:
    hook = bench.hook()
    await hook.hello()
    bench.receiver.expect("r")
    bad = [m for m in garbage() if m]
    for message in bad:
        await hook.socket.send_multipart(message)
    await bench.until("invalid", len(bad))
    assert await bench.receiver.wait("r", 0.0) is None
    assert len(bench.cache) == 0
    assert [h.worker for h in bench.receiver.hooks] == ["p0"]
    await hook.request("r", [], TAIL, 5)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert signature.state == "exact"


@pytest.mark.parametrize("fingerprint", [-1, -(2**63), 2**64 - 1])
async def test_any_fingerprint(bench: Bench, fingerprint: int) -> None:
    hook = bench.hook()
    bench.receiver.expect("r")
    await hook.hello(fingerprint=fingerprint)
    await hook.blocks([1, 2, 3], COUNTS[:3])
    await hook.request("r", [1, 2, 3], TAIL, TOKENS)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert signature.state == "exact"


async def test_a_geometry_too_wide_for_the_cache(bench: Bench) -> None:
    """A row larger than the whole budget: the request is partial, and the receiver goes on."""
    hook = bench.hook()
    bench.receiver.expect("r")
    experts = 1 << 21
    await hook.hello(experts=experts, layers=[0], top_k=1)
    wide = np.zeros((1, experts), np.uint8)
    wide[0, 0] = BLOCK
    await hook.blocks([1], wide)
    await hook.request("r", [1], wide[0] * 0, BLOCK)
    await bench.receiver.wait("r", 0.2)
    other = bench.hook()
    await other.hello(worker="p1")
    bench.receiver.expect("s")
    await other.request("s", [], TAIL, 5)
    signature = await bench.receiver.wait("s", 60)
    assert signature is not None
    assert signature.state == "exact"


async def test_another_geometry_is_told(bench: Bench, lines: list[Any]) -> None:
    hook = bench.hook()
    await hook.hello()
    await bench.until("hello")
    other = bench.hook()
    await other.hello(worker="p1", experts=8)
    await bench.until("unlike")
    assert [line["event"] for line in lines].count("hook_geometry_differs") == 1
    assert {h.worker for h in bench.receiver.hooks} == {"p0", "p1"}


async def test_models_share_no_rows(bench: Bench) -> None:
    one, other = bench.hook(), bench.hook()
    await one.hello()
    await other.hello(worker="p1", fingerprint=8)
    await one.blocks([1, 2, 3], COUNTS[:3])
    await bench.until("blocks")
    bench.receiver.expect("r")
    await other.request("r", [1, 2, 3], TAIL, TOKENS)
    await bench.until("request")
    signature = await bench.receiver.wait("r", 0.1)
    assert signature is not None
    assert signature.state == "partial"


async def test_lost_messages_are_counted(bench: Bench) -> None:
    hook = bench.hook()
    await hook.hello()
    await hook.blocks([1], COUNTS[:1])
    hook.seq += 3
    await hook.blocks([2], COUNTS[1:2])
    await bench.until("blocks", 2)
    assert bench.frames("lost") == 3


async def test_reconnect_under_a_new_identity(bench: Bench) -> None:
    first, second = bench.hook(), bench.hook()
    await first.hello()
    await bench.until("hello")
    first.socket.close()
    await second.hello()
    await bench.until("hello", 2)
    assert len(bench.receiver.hooks) == 1
    assert len(bench.receiver._peers) == 1
    bench.receiver.expect("r")
    await second.blocks([1, 2, 3], COUNTS[:3])
    await second.request("r", [1, 2, 3], TAIL, TOKENS)
    signature = await bench.receiver.wait("r", 60)
    assert signature is not None
    assert signature.state == "exact"
    assert bench.frames("lost") == 0


async def test_rows_sent_again_after_a_reconnect_complete_a_request(bench: Bench) -> None:
    first, second = bench.hook(), bench.hook()
    await first.hello()
    bench.receiver.expect("r")
    await first.request("r", [1, 2, 3], TAIL, TOKENS)
    await bench.until("want")
    first.socket.close()
    await second.hello()
    await second.blocks([1, 2, 3], COUNTS[:3])
    signature = await bench.receiver.wait("r", 2)
    assert signature is not None
    assert signature.state == "exact"


async def test_a_burst_is_taken_to_its_end(bench: Bench) -> None:
    hook = bench.hook()
    await hook.hello()
    for i in range(500):
        bench.receiver.expect(f"r{i}")
    for i in range(500):
        await hook.request(f"r{i}", [], TAIL, 5)
    for i in range(500):
        signature = await bench.receiver.wait(f"r{i}", 60)
        assert signature is not None


async def test_cancelled_wait(bench: Bench) -> None:
    bench.receiver.expect("r")
    task = asyncio.create_task(bench.receiver.wait("r", 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    bench.receiver.forget("r")
    hook = bench.hook()
    await hook.hello()
    await hook.request("r", [], TAIL, 5)
    await bench.until("unasked")


async def test_endpoint_taken(bench: Bench) -> None:
    other = SignatureReceiver(bench.cache, bench.metrics)
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        other.start(bench.endpoint)
    other.close()
