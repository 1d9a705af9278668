"""Attribution against a per-token reference: any schedule of chunks, preemptions and prefix hits, any batch layout."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict

import numpy as np
import pytest
from eldrd_hook.attribution import (
    SENTINEL,
    Attributor,
    Chunk,
    Counted,
    Opened,
    Record,
    Step,
    low64,
    rows_by_order,
    rows_by_slot,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LAYERS, EXPERTS, TOP_K, BLOCK = 3, 8, 2, 4


def experts_of(tokens: tuple[int, ...], position: int) -> np.ndarray:
    """The routing of one token, a function of all tokens up to it: distinct experts [L, k]."""
    seed = hashlib.sha256(repr(tokens[: position + 1]).encode()).digest()
    rng = np.random.default_rng(list(seed))
    return np.stack([rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(LAYERS)])


def signature(tokens: tuple[int, ...]) -> np.ndarray:
    """Counted one token after the other: the cold signature [L * E]."""
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    for position in range(len(tokens)):
        for layer, chosen in enumerate(experts_of(tokens, position)):
            counts[layer, chosen] += 1
    return counts.ravel()


def hash_of(tokens: tuple[int, ...], block: int) -> int:
    return low64(hashlib.sha256(repr(tokens[: (block + 1) * BLOCK]).encode()).digest())


class Engine:
    """A toy scheduler: shared KV blocks, chunks, preemption, and a batch whose rows lie in any order."""

    def __init__(self, seed: int, prompts: list[tuple[int, ...]], *, by_order: bool, lossy: bool) -> None:
        self.rng, self.by_order, self.lossy = random.Random(seed), by_order, lossy
        self.prompts = {f"r{i}": p for i, p in enumerate(prompts)}
        self.computed: dict[str, int] = {}
        self.hashed: defaultdict[str, int] = defaultdict(int)
        self.tables: dict[str, list[int]] = {}
        self.cached: set[int] = set()
        self.rows: dict[int, np.ndarray] = {}
        self.records: dict[str, Record] = {}
        self.next_block = 1
        self.attributor = Attributor(LAYERS, EXPERTS, BLOCK)

    def begin(self, request: str) -> None:
        """Starts or restarts a request behind the longest cached prefix, or an earlier block boundary."""
        tokens = self.prompts[request]
        hit = 0
        while (hit + 1) * BLOCK < len(tokens) and hash_of(tokens, hit) in self.cached:
            hit += 1
        self.computed[request] = self.rng.randint(0, hit) * BLOCK
        self.tables[request] = []
        for _ in range(-(-len(tokens) // BLOCK)):
            self.tables[request].append(self.next_block)
            self.next_block += self.rng.randint(1, 3)

    def step(self) -> None:
        step = Step()
        for request, tokens in self.prompts.items():
            at = self.computed.get(request)
            if at is None:
                if self.rng.randint(0, 2) == 0:
                    continue
                step.opened.append(Opened(request, request, len(tokens)))
                self.begin(request)
            elif self.rng.randint(0, 5) == 0:  # preempted, while prefilling or decoding
                self.begin(request)
            start = self.computed[request]
            n = min(self.rng.randint(0, 3 * BLOCK), len(tokens) - start)
            if n == 0:
                if step.opened and step.opened[-1].request == request:
                    step.opened.pop()
                    del self.computed[request]
                continue
            sent, full = self.hashed[request], len(tokens) // BLOCK
            if sent < full:
                until = self.rng.randint(sent, full) if self.lossy else full
                step.hashes[request] = (sent, [hash_of(tokens, b) for b in range(sent, until)])
                self.hashed[request] = until
            table = self.tables[request][start // BLOCK : (start + n - 1) // BLOCK + 1]
            step.chunks.append(Chunk(request, start, start + n, tuple(table)))
            self.computed[request] = start + n
        self.take(step)

    def take(self, step: Step) -> None:
        tokens: list[tuple[int, np.ndarray]] = []
        order = [c.request for c in step.chunks] + ["a decode"]
        for c in step.chunks:
            for p in range(c.start, c.stop):
                slot = c.blocks[p // BLOCK - c.start // BLOCK] * BLOCK + p % BLOCK
                tokens.append((slot, experts_of(self.prompts[c.request], p)))
        tokens.append((10**6, np.zeros((LAYERS, TOP_K), np.int64)))
        if not self.by_order:
            self.rng.shuffle(tokens)
        ids = np.stack([t for _, t in tokens]).astype(np.int16)
        slots = np.array([s for s, _ in tokens] + [-1, -1], np.int64)
        lost = False
        if self.lossy:
            lost = self.rng.randint(0, 4) == 0
            row, layer = self.rng.randint(0, len(ids) - 1), self.rng.randint(0, LAYERS - 1)
            if self.rng.randint(0, 2) == 0:
                ids[row, layer] = SENTINEL
            if self.rng.randint(0, 4) == 0:
                return  # the whole step is lost
        if self.by_order:
            scheduled = {c.request: c.stop - c.start for c in step.chunks} | {"a decode": 1}
            rows = rows_by_order(step.chunks, order, scheduled)
        else:
            rows = rows_by_slot(step.chunks, slots, BLOCK)
        self.keep(self.attributor.count(step, rows, None if lost else ids))

    def keep(self, counted: Counted) -> None:
        for h, row in zip(counted.hashes.tolist(), counted.counts, strict=True):
            self.rows.setdefault(h, row)
            self.cached.add(h)
        for record in counted.records:
            assert record.key not in self.records, "one record a request"
            self.records[record.key] = record

    def summed(self, record: Record) -> np.ndarray | None:
        total = record.counts.astype(np.int64)
        for h in record.hashes.tolist():
            if h not in self.rows:
                return None
            total = total + self.rows[h]
        return total


prompts_of = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5 * BLOCK).map(tuple), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), prompts_of, st.booleans())
def test_every_signature_is_the_cold_one(seed: int, prompts: list[tuple[int, ...]], by_order: bool) -> None:
    engine = Engine(seed, prompts, by_order=by_order, lossy=False)
    for _ in range(500):
        if len(engine.records) == len(prompts):
            break
        engine.step()
    assert len(engine.records) == len(prompts)
    for key, record in engine.records.items():
        tokens = engine.prompts[key]
        assert (record.tokens, len(record.hashes), record.tail) == (len(tokens), *divmod(len(tokens), BLOCK))
        assert not record.partial
        np.testing.assert_array_equal(engine.summed(record), signature(tokens))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), prompts_of, st.booleans())
def test_lost_captures_are_never_a_wrong_signature(seed: int, prompts: list[tuple[int, ...]], by_order: bool) -> None:
    engine = Engine(seed, prompts, by_order=by_order, lossy=True)
    for _ in range(30):
        engine.step()
    for key, record in engine.records.items():
        total = engine.summed(record)
        if total is not None and not record.partial:
            np.testing.assert_array_equal(total, signature(engine.prompts[key]))


def _ids(n: int) -> np.ndarray:
    return np.tile(np.arange(TOP_K, dtype=np.int16), (n, LAYERS, 1))


@pytest.mark.parametrize("strange", [SENTINEL, EXPERTS])
def test_ids_that_are_no_experts_make_the_request_partial_and_hold_the_block_back(strange: int) -> None:
    ids = _ids(6)
    ids[1, 2] = strange
    chunk = Chunk("r", 0, 6, (1, 2))
    step = Step([Opened("r", "key", 6)], {"r": (0, [11])}, [chunk])
    counted = Attributor(LAYERS, EXPERTS, BLOCK).count(step, rows_by_order([chunk], ["r"], {"r": 6}), ids)
    assert counted.hashes.tolist() == []
    assert [r.partial for r in counted.records] == [True]


@pytest.mark.parametrize("second", [Chunk("r", 2, 6, (1, 2)), Chunk("r", 5, 7, (2,)), Chunk("r", 1, 4, (1,))])
def test_a_gap_within_a_block_is_partial(second: Chunk) -> None:
    """Tokens whose KV came from elsewhere, in the middle of a block: its counts would be wrong."""
    a = Attributor(LAYERS, EXPERTS, BLOCK)
    a.count(Step([Opened("r", "key", 7)], {"r": (0, [11])}, [Chunk("r", 0, 3, (1,))]), [np.arange(3)], _ids(3))
    n = second.stop - second.start
    last = Chunk("r", second.stop, 7, (2,))
    counted = [a.count(Step(chunks=[second]), [np.arange(n)], _ids(n))]
    if last.start < last.stop:
        counted.append(a.count(Step(chunks=[last]), [np.arange(7 - second.stop)], _ids(7 - second.stop)))
    assert [r.partial for c in counted for r in c.records] == [True]
    assert all(c.hashes.tolist() == [] for c in counted)


def test_recomputing_a_bad_block_from_its_start_mends_it() -> None:
    a = Attributor(LAYERS, EXPERTS, BLOCK)
    first, again = Chunk("r", 0, 3, (1,)), Chunk("r", 0, 5, (2, 3))
    a.count(Step([Opened("r", "key", 5)], {"r": (0, [11])}, [first]), [np.arange(3)], None)
    counted = a.count(Step(chunks=[again]), [np.arange(5)], _ids(5))
    assert counted.hashes.tolist() == [11]
    assert [(r.partial, r.tail) for r in counted.records] == [(False, 1)]


def test_without_a_key_blocks_go_out_but_no_record() -> None:
    chunk = Chunk("r", 0, 4, (1,))
    step = Step([Opened("r", None, 4)], {"r": (0, [7])}, [chunk])
    counted = Attributor(LAYERS, EXPERTS, BLOCK).count(step, [np.arange(4)], _ids(4))
    assert (counted.hashes.tolist(), counted.records) == ([7], [])


def test_hashes_that_never_came_make_the_record_partial() -> None:
    chunk = Chunk("r", 8, 10, (1,))
    step = Step([Opened("r", "key", 10)], {"r": (0, [7])}, [chunk])
    counted = Attributor(LAYERS, EXPERTS, BLOCK).count(step, [np.arange(2)], _ids(2))
    assert [r.partial for r in counted.records] == [True]


def test_hashes_after_a_lost_step_silence_the_request() -> None:
    chunk = Chunk("r", 4, 8, (1,))
    step = Step([Opened("r", "key", 8)], {"r": (1, [7])}, [chunk])
    counted = Attributor(LAYERS, EXPERTS, BLOCK).count(step, [np.arange(4)], _ids(4))
    assert (counted.hashes.tolist(), counted.records) == ([], [])


def test_closed_requests_are_forgotten() -> None:
    a = Attributor(LAYERS, EXPERTS, BLOCK)
    chunk = Chunk("r", 0, 2, (1,))
    a.count(Step([Opened("r", "key", 4)], {"r": (0, [7])}, [chunk], {"r": 1}), [np.arange(2)], _ids(2))
    assert a._prompts == {}


@pytest.mark.parametrize(("block_size", "dtype"), [(16, "u1"), (255, "u1"), (256, "<u2")])
def test_dtype_holds_a_block_of_one_expert(block_size: int, dtype: str) -> None:
    chunk = Chunk("r", 0, block_size, (0,))
    step = Step([Opened("r", None, block_size)], {"r": (0, [7])}, [chunk])
    counted = Attributor(LAYERS, EXPERTS, block_size).count(step, [np.arange(block_size)], _ids(block_size))
    assert counted.counts.dtype == np.dtype(dtype)
    assert counted.counts[0].max() == block_size


def test_large_chunks_are_counted_in_parts() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, EXPERTS, (9001, LAYERS, TOP_K)).astype(np.int16)
    chunk = Chunk("r", 2, 9003, tuple(range(9003 // BLOCK + 1)))
    step = Step([Opened("r", "key", 9003)], {"r": (0, list(range(9003 // BLOCK)))}, [chunk])
    counted = Attributor(LAYERS, EXPERTS, BLOCK).count(step, [np.arange(9001)], ids)
    assert counted.hashes.tolist() == list(range(1, 9003 // BLOCK))  # the first block began elsewhere
    inside = ids[2 : 2 + BLOCK * len(counted.hashes)]
    expected = [np.bincount(inside[:, i].ravel(), minlength=EXPERTS) for i in range(LAYERS)]
    np.testing.assert_array_equal(counted.counts.sum(axis=0, dtype=np.int64), np.concatenate(expected))


def test_low64_is_what_kv_events_carry() -> None:
    digest = bytes(range(32))
    assert low64(digest) == int.from_bytes(digest, "big") & ((1 << 64) - 1)


def test_slots_that_the_step_did_not_write_are_unknown() -> None:
    chunks = [Chunk("r", 0, 2, (5,)), Chunk("s", 0, 2, (9,)), Chunk("t", 3, 6, (7,))]
    found = rows_by_slot(chunks, np.array([21, 20, -1]), BLOCK)
    assert found[0] is not None
    assert found[0].tolist() == [1, 0]
    assert found[1:] == [None, None]
