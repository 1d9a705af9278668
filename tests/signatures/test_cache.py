"""The block cache against a dictionary and NumPy sums. No timing here; loadgen/bench/route.py measures."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.signatures import kernels
from eldrd.signatures.cache import SignatureCache, warm_up
from eldrd.signatures.geometry import Geometry
from eldrd.signatures.kernels import STRIDE

if TYPE_CHECKING:
    from numpy.typing import NDArray

GEOMETRY = Geometry("m", 0xFEDCBA9876543210, (1, 2, 5), 8, 2, 16)
WIDE = replace(GEOMETRY, block_size=256)
BIG = 1 << 20


def hashes(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def rows(n: int, geometry: Geometry = GEOMETRY, seed: int = 0) -> NDArray[np.uint8] | NDArray[np.uint16]:
    wide = geometry.block_size >= 256
    rng = np.random.default_rng(seed)
    return rng.integers(0, geometry.block_size + 1, (n, geometry.width), np.uint16 if wide else np.uint8)


def gathered(cache: SignatureCache, keys: NDArray[np.uint64], geometry: Geometry = GEOMETRY) -> tuple[list[int], int]:
    out = np.zeros(geometry.width, np.int32)
    missing = cache.gather(geometry, keys, out)
    return out.tolist(), missing


operations = st.lists(
    st.tuples(st.sampled_from(["insert", "gather", "lacking", "remove"]), st.lists(st.integers(0, 40), max_size=30)),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(operations)
def test_behaves_like_a_dictionary_while_nothing_is_evicted(steps: list[tuple[str, list[int]]]) -> None:
    cache = SignatureCache(BIG)
    model: dict[int, NDArray[np.int64]] = {}
    hits = misses = 0
    for seed, (what, values) in enumerate(steps):
        keys = hashes(*values)
        if what == "insert":
            counts = rows(len(values), seed=seed)
            new = len(set(values) - set(model))
            assert cache.insert(GEOMETRY, keys, counts) == new
            for value, row in zip(values, counts, strict=True):
                model.setdefault(value, row.astype(np.int64))
        elif what == "gather":
            start = np.arange(GEOMETRY.width, dtype=np.int32)
            out = start.copy()
            found = [model[v] for v in values if v in model]
            assert cache.gather(GEOMETRY, keys, out) == len(values) - len(found)
            assert out.tolist() == (start + sum(found)).tolist()
            hits += len(found)
            misses += len(values) - len(found)
        elif what == "lacking":
            assert cache.lacking(GEOMETRY, keys).tolist() == [v for v in values if v not in model]
        else:
            assert cache.remove(GEOMETRY, keys) == len(set(values) & set(model))
            for v in values:
                model.pop(v, None)
        assert len(cache) == len(model)
    assert (cache.hits, cache.misses, cache.evictions) == (hits, misses, 0)


@settings(max_examples=80, deadline=None)
@given(operations)
def test_a_small_cache_never_answers_wrongly(steps: list[tuple[str, list[int]]]) -> None:
    cache = SignatureCache(500)
    truth = rows(41).astype(np.int64)
    for what, values in steps:
        keys = hashes(*values)
        if what == "insert":
            cache.insert(GEOMETRY, keys, truth[values].astype(np.uint8).reshape(-1, GEOMETRY.width))
        elif what == "remove":
            cache.remove(GEOMETRY, keys)
        assert len(cache) <= max(cache.capacity, 0)
        lacking = set(cache.lacking(GEOMETRY, hashes(*range(41))).tolist())
        present = [v for v in range(41) if v not in lacking]
        assert len(present) == len(cache)
        assert gathered(cache, hashes(*range(41))) == (truth[present].sum(0).tolist(), len(lacking))
    assert cache.capacity in (0, 9)


def test_adversarial_hashes_survive_deletion_in_full_runs() -> None:
    cache = SignatureCache(BIG)
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, 9000, dtype=np.uint64)
    counts = rows(9000)
    cache.insert(GEOMETRY, keys, counts)
    assert len(cache) == 9000
    for _ in range(5):  # tombstones would pile up here, lost entries would show as missing
        cache.remove(GEOMETRY, keys[::2])
        assert cache.lacking(GEOMETRY, keys).tolist() == keys[::2].tolist()
        cache.insert(GEOMETRY, keys[::2], counts[::2])
    assert gathered(cache, keys) == (counts.sum(0, dtype=np.int64).tolist(), 0)


def test_clock_spares_rows_that_were_read() -> None:
    cache = SignatureCache(1000)
    cache.insert(GEOMETRY, hashes(0), rows(1))
    n = cache.capacity
    cache.insert(GEOMETRY, hashes(*range(n)), rows(n))
    gathered(cache, hashes(1, 3))
    cache.insert(GEOMETRY, hashes(*range(100, 100 + n - 3)), rows(n - 3))
    kept = set(range(n)) - set(cache.lacking(GEOMETRY, hashes(*range(n))).tolist())
    assert {0, 1, 3} <= kept  # 0 was inserted twice, 1 and 3 were read
    assert cache.evictions == n - 3
    assert len(cache) == n


def test_more_rows_than_fit_keep_the_latest() -> None:
    cache = SignatureCache(1000)
    counts = rows(100)
    assert cache.insert(GEOMETRY, hashes(*range(100)), counts) == 100
    n = cache.capacity
    assert 0 < n < 100
    assert cache.lacking(GEOMETRY, hashes(*range(100))).tolist() == list(range(100 - n))
    assert gathered(cache, hashes(*range(100 - n, 100))) == (counts[-n:].sum(0, dtype=np.int64).tolist(), 0)


def test_models_of_one_layout_share_a_table_but_no_row() -> None:
    cache = SignatureCache(BIG)
    other = replace(GEOMETRY, fingerprint=7)
    cache.insert(GEOMETRY, hashes(1, 2), rows(2))
    capacity = cache.capacity
    assert cache.insert(other, hashes(2, 3), rows(2, seed=9)) == 2
    assert cache.capacity == capacity
    assert gathered(cache, hashes(1, 2)) == (rows(2).sum(0, dtype=np.int64).tolist(), 0)
    assert cache.lacking(other, hashes(1, 2, 3)).tolist() == [1]
    assert cache.remove(other, hashes(1, 2)) == 1
    assert cache.lacking(GEOMETRY, hashes(1, 2)).tolist() == []


def test_a_new_layout_splits_the_budget_and_starts_anew() -> None:
    cache = SignatureCache(BIG)
    cache.insert(GEOMETRY, hashes(1), rows(1))
    alone = cache.capacity
    cache.insert(WIDE, hashes(1), rows(1, WIDE))
    assert len(cache) == 1
    assert cache.capacity < alone
    assert gathered(cache, hashes(1)) == ([0] * GEOMETRY.width, 1)
    assert gathered(cache, hashes(1), WIDE) == (rows(1, WIDE)[0].tolist(), 0)
    cache.insert(GEOMETRY, hashes(1), rows(1))
    assert len(cache) == 2  # no thrashing once both layouts are known


class Chains:
    """Prompts of three branches of one trunk, as chains of block hashes, and the row of every block."""

    def __init__(self) -> None:
        self.row: dict[int, NDArray[np.uint8]] = {}
        trunk = self._grow([], 2 * STRIDE + 5, 0)
        self.prompts = [self._grow(trunk[:cut], n, cut) for cut, n in ((300, 0), (150, 250), (STRIDE, 70))]

    def _grow(self, chain: list[int], n: int, seed: int) -> list[int]:
        chain = list(chain)
        rng = np.random.default_rng(seed)
        for _ in range(n):
            chain.append(hash((tuple(chain[-1:]), seed, len(chain))) % 2**64)
            self.row[chain[-1]] = rng.integers(0, 17, GEOMETRY.width, np.uint8)
        return chain

    def rows(self, chain: list[int]) -> NDArray[np.uint8]:
        return np.array([self.row[h] for h in chain], np.uint8).reshape(-1, GEOMETRY.width)


CHAINS = Chains()
TAIL = np.arange(GEOMETRY.width, dtype=np.uint8)
pieces = st.tuples(
    st.sampled_from(["insert", "gather", "remove"]), st.integers(0, 2), st.integers(0, 400), st.integers(0, 400)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=25), st.sampled_from([8_000, 20_000, 40_000, BIG]))
def test_sums_of_chains_are_exact_or_say_what_is_missing(steps: list[tuple[str, int, int, int]], budget: int) -> None:
    """Whatever was inserted, evicted and removed before: a sum that misses nothing is the plain sum, a block that is
    not reported missing is in it, and a block that is here is never reported missing."""
    cache = SignatureCache(budget)
    removed_last: set[int] = set()
    for what, prompt, a, b in steps:
        chain = CHAINS.prompts[prompt]
        piece = chain[min(a, b) : max(a, b)]
        if what == "insert":
            cache.insert(GEOMETRY, hashes(*piece), CHAINS.rows(piece))
            removed_last -= set(piece)
        elif what == "remove":
            cache.remove(GEOMETRY, hashes(*piece))
            removed_last |= set(piece)
        else:
            asked = chain[: max(a, b)]
            lacking = cache.lacking(GEOMETRY, hashes(*asked)).tolist()
            here = [h for h in asked if h not in set(lacking)]
            total, missing = gathered(cache, hashes(*asked))
            assert missing == len(lacking)
            assert total == CHAINS.rows(here).sum(0, dtype=np.int64).tolist()
            summed, lost, cells = cache.add_up(GEOMETRY, hashes(*asked), TAIL)
            assert summed.tolist() == [t + int(x) for t, x in zip(total, TAIL, strict=True)]
            assert (lost, cells) == (missing, sum(total) + int(TAIL.sum()))
            single = {h for h in asked if not cache.lacking(GEOMETRY, hashes(h)).size}
            assert single <= set(here)
            assert not single & removed_last
    assert cache.bytes <= budget


def test_a_checkpoint_answers_for_rows_that_are_gone() -> None:
    cache = SignatureCache(BIG)
    chain = CHAINS.prompts[1]
    cache.insert(GEOMETRY, hashes(*chain), CHAINS.rows(chain))
    whole = CHAINS.rows(chain).sum(0, dtype=np.int64).tolist()
    assert gathered(cache, hashes(*chain)) == (whole, 0)
    assert cache.checkpoints == len(chain) // STRIDE
    last = len(chain) // STRIDE * STRIDE - 1
    cache.remove(GEOMETRY, hashes(*chain[:last]))
    assert cache.checkpoints == 1
    assert gathered(cache, hashes(*chain)) == (whole, 0)
    assert cache.lacking(GEOMETRY, hashes(*chain)).size == 0
    cache.remove(GEOMETRY, hashes(chain[last]))
    assert gathered(cache, hashes(*chain))[1] == last + 1
    assert cache.hits == 2 * len(chain) + len(chain) - last - 1


def test_models_share_no_checkpoint() -> None:
    cache = SignatureCache(BIG)
    other = replace(GEOMETRY, fingerprint=7)
    keys = hashes(*CHAINS.prompts[1][:STRIDE])
    ours, theirs = rows(STRIDE), rows(STRIDE, seed=1)
    for geometry, counts in ((GEOMETRY, ours), (other, theirs)):
        cache.insert(geometry, keys, counts)
        assert gathered(cache, keys, geometry) == (counts.sum(0, dtype=np.int64).tolist(), 0)
    assert gathered(cache, keys) == (ours.sum(0, dtype=np.int64).tolist(), 0)
    assert cache.checkpoints == 2


def test_a_sum_with_gaps_leaves_no_checkpoint() -> None:
    cache = SignatureCache(BIG)
    chain = CHAINS.prompts[0]
    cache.insert(GEOMETRY, hashes(*chain[1:]), CHAINS.rows(chain[1:]))
    assert gathered(cache, hashes(*chain))[1] == 1
    assert cache.checkpoints == 0


def test_wide_rows_hold_counts_above_255() -> None:
    cache = SignatureCache(BIG)
    counts = np.full((9, WIDE.width), 65535, np.uint16)
    cache.insert(WIDE, hashes(*range(9)), counts)
    assert gathered(cache, hashes(*range(9)), WIDE) == ([9 * 65535] * WIDE.width, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_adds_up_tails_of_any_width(dtype: type[np.unsignedinteger[Any]]) -> None:
    cache = SignatureCache(BIG)
    tail = np.full(GEOMETRY.width, min(np.iinfo(dtype).max, 2**31 - 100), dtype)
    for known in (False, True):
        counts, missing, cells = cache.add_up(GEOMETRY, hashes(1, 2), tail)
        assert counts.dtype == np.int32
        assert (counts == tail.astype(np.int64) + (rows(1)[0] if known else 0)).all()
        assert (missing, cells) == (1 if known else 2, counts.sum(dtype=np.int64))
        cache.insert(GEOMETRY, hashes(1), rows(1))
    assert (cache.hits, cache.misses) == (1, 3)
    with pytest.raises(ValueError, match="tail has shape"):
        cache.add_up(GEOMETRY, hashes(1), tail[:-1])


def test_unknown_geometry_is_missing_and_costs_nothing() -> None:
    cache = SignatureCache(BIG)
    assert gathered(cache, hashes(1, 2)) == ([0] * GEOMETRY.width, 2)
    assert cache.lacking(GEOMETRY, hashes(1, 2)).tolist() == [1, 2]
    assert cache.remove(GEOMETRY, hashes(1)) == 0
    assert (cache.capacity, cache.bytes, len(cache), cache.misses) == (0, 0, 0, 2)


def test_clear_keeps_the_counters() -> None:
    cache = SignatureCache(BIG)
    cache.insert(GEOMETRY, hashes(1), rows(1))
    gathered(cache, hashes(1))
    assert cache.bytes > GEOMETRY.width
    cache.clear()
    assert (len(cache), cache.bytes, cache.hits) == (0, 0, 1)
    assert cache.lacking(GEOMETRY, hashes(1)).tolist() == [1]


def test_takes_arrays_over_network_buffers() -> None:
    cache = SignatureCache(BIG)
    counts = rows(3)
    frame = b"x" + hashes(1, 2, 3).tobytes()
    cache.insert(GEOMETRY, np.frombuffer(frame, "<u8", offset=1), np.frombuffer(counts.tobytes(), "u1").reshape(3, -1))
    assert gathered(cache, np.frombuffer(frame, "<u8", offset=1)) == (counts.sum(0, dtype=np.int64).tolist(), 0)
    cache.insert(GEOMETRY, hashes(4), counts[:1].astype(np.uint16))
    assert gathered(cache, hashes(4)) == (counts[0].tolist(), 0)


def test_rejects_what_cannot_be() -> None:
    cache = SignatureCache(BIG)
    with pytest.raises(ValueError, match="budget_bytes is 0"):
        SignatureCache(0)
    with pytest.raises(ValueError, match=r"shape \(2, 24\), expected \(1, 24\)"):
        cache.insert(GEOMETRY, hashes(1), rows(2))
    with pytest.raises(ValueError, match="a count of 300 in a block of 16 tokens"):
        cache.insert(GEOMETRY, hashes(1), np.full((1, GEOMETRY.width), 300, np.uint16))
    with pytest.raises(ValueError, match="out is int64"):
        cache.gather(GEOMETRY, hashes(1), np.zeros(GEOMETRY.width, np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected contiguous int32"):
        cache.gather(GEOMETRY, hashes(1), np.zeros(GEOMETRY.width + 1, np.int32))


def test_a_large_budget_takes_no_memory_until_used() -> None:
    warm_up()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = SignatureCache(4 << 30)
    cache.insert(GEOMETRY, hashes(1), rows(1))
    assert cache.capacity > 10_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_warm_up_covers_the_daemons_calls() -> None:
    warm_up()
    dispatchers = (
        kernels.insert, kernels.gather, kernels.gather_chain, kernels.add_up, kernels.add_up_chain, kernels.latest,
        kernels.lacking, kernels.remove,
    )  # fmt: skip
    compiled = [len(k.signatures) for k in dispatchers]
    for geometry in (GEOMETRY, WIDE):
        cache = SignatureCache(BIG)
        cache.insert(geometry, np.frombuffer(hashes(1).tobytes(), "<u8"), rows(1, geometry))
        for n in (1, STRIDE):
            gathered(cache, hashes(*range(n)), geometry)
            cache.lacking(geometry, hashes(*range(n)))
            for tail in ("<u1", "<u2", "<u4"):
                cache.add_up(
                    geometry, hashes(*range(n)), np.frombuffer(bytes(4 * geometry.width), tail, geometry.width)
                )
        cache.remove(geometry, hashes(1))
    assert [len(k.signatures) for k in dispatchers] == compiled
