"""Numba kernels of the block cache: an open-addressed index over a slab of rows. Arrays only: no objects, no locks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

# Fields of a table's state vector, kept in an array because Numba kernels update it in place.
_FREED: Final = 0  # entries on the stack of freed rows
_USED: Final = 1  # rows ever handed out, the high-water mark
_HAND: Final = 2  # the clock's hand
LIVE: Final = 3  # rows stored now

# Blocks between two checkpoints: fewer cost memory (a checkpoint is four rows), more cost time (rows left to add).
STRIDE: Final = 128


@njit(cache=True, nogil=True)
def mix(block_hash: Any, salt: Any) -> Any:
    """The table's key of a block hash: splitmix64's finalizer, a bijection, so one model's hashes never collide."""
    x = block_hash ^ salt
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def find(index: Any, keys: Any, key: Any) -> Any:
    """(slot, row) of a key; row is -1 where it is absent, slot then being the vacant one it belongs in."""
    mask = np.uint64(index.size - 1)
    slot = np.int64(key & mask)
    while True:
        row = np.int64(index[slot]) - 1
        if row < 0 or keys[row] == key:
            return slot, row
        slot = (slot + 1) & np.int64(mask)


@njit(cache=True, nogil=True)
def vacate(index: Any, keys: Any, slot: Any) -> None:
    """Empty a slot and shift later entries of its run back, so that no tombstone is needed (Knuth 6.4, algorithm R)."""
    mask = np.int64(index.size - 1)
    hole = slot
    while True:
        slot = (slot + 1) & mask
        entry = index[slot]
        if entry == 0:
            break
        home = np.int64(keys[entry - 1] & np.uint64(mask))
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            index[hole] = entry
            hole = slot
    index[hole] = 0


@njit(cache=True, nogil=True)
def insert(
    index: Any, keys: Any, referenced: Any, freed: Any, state: Any, slab: Any, hashes: Any, salt: Any, counts: Any
) -> Any:
    new = 0
    evicted = 0
    for i in range(hashes.size):
        key = mix(hashes[i], salt)
        slot, row = find(index, keys, key)
        if row >= 0:
            referenced[row] = 1
            continue
        if state[_FREED] > 0:
            state[_FREED] -= 1
            row = np.int64(freed[state[_FREED]])
        elif state[_USED] < slab.shape[0]:
            row = state[_USED]
            state[_USED] += 1
        else:
            row = state[_HAND]
            while referenced[row]:
                referenced[row] = 0
                row = row + 1 if row + 1 < slab.shape[0] else 0
            state[_HAND] = row + 1 if row + 1 < slab.shape[0] else 0
            victim, _ = find(index, keys, keys[row])
            vacate(index, keys, victim)
            state[LIVE] -= 1
            evicted += 1
            slot, _ = find(index, keys, key)  # the shift may have moved the vacant slot
        keys[row] = key
        # A row earns its second chance by being read, so one long prompt cannot push out what others reuse.
        referenced[row] = 0
        index[slot] = row + 1
        slab[row, :] = counts[i, :]
        state[LIVE] += 1
        new += 1
    return new, evicted


@njit(cache=True, nogil=True)
def gather(index: Any, keys: Any, referenced: Any, slab: Any, hashes: Any, salt: Any, out: Any) -> Any:
    rows = np.empty(hashes.size, np.int64)
    found = 0
    for i in range(hashes.size):
        _, row = find(index, keys, mix(hashes[i], salt))
        if row >= 0:
            referenced[row] = 1
            rows[found] = row
            found += 1
    # Eight rows a pass: out is read and written an eighth as often, and eight streams hide the memory's latency.
    for i in range(0, found - 7, 8):
        a, b, c, d = slab[rows[i]], slab[rows[i + 1]], slab[rows[i + 2]], slab[rows[i + 3]]
        e, f, g, h = slab[rows[i + 4]], slab[rows[i + 5]], slab[rows[i + 6]], slab[rows[i + 7]]
        for j in range(out.size):
            left = np.int32(a[j]) + np.int32(b[j]) + np.int32(c[j]) + np.int32(d[j])
            out[j] += left + np.int32(e[j]) + np.int32(f[j]) + np.int32(g[j]) + np.int32(h[j])
    for i in range(found - found % 8, found):
        a = slab[rows[i]]
        for j in range(out.size):
            out[j] += np.int32(a[j])
    return hashes.size - found


@njit(cache=True, nogil=True)
def latest(index: Any, keys: Any, hashes: Any, salt: Any) -> Any:
    """(blocks covered, row) of the checkpoint that covers most of a prompt; (0, -1) without one."""
    covered = hashes.size - hashes.size % STRIDE
    while covered > 0:
        _, row = find(index, keys, mix(hashes[covered - 1], salt))
        if row >= 0:
            return covered, row
        covered -= STRIDE
    return 0, np.int64(-1)


@njit(cache=True, nogil=True)
def gather_chain(rows: Any, sums: Any, hashes: Any, salt: Any, total: Any, out: Any) -> Any:
    """``_gather`` from the latest checkpoint on, leaving checkpoints behind. rows, sums: a table's and its checkpoints'
    arrays; total: int32 [L * E] to work in."""
    index, keys, referenced, slab = rows
    sums_index, sums_keys, sums_referenced, sums_slab, sums_freed, sums_state = sums
    start, row = latest(sums_index, sums_keys, hashes, salt)
    if row >= 0:
        sums_referenced[row] = 1
        total[:] = sums_slab[row]
    else:
        total[:] = 0
    missing = 0
    while start < hashes.size:
        stop = min(start + STRIDE, hashes.size)
        missing += gather(index, keys, referenced, slab, hashes[start:stop], salt, total)
        if missing == 0 and stop - start == STRIDE:
            last, sum_ = hashes[stop - 1 : stop], total.reshape(1, total.size)
            insert(sums_index, sums_keys, sums_referenced, sums_freed, sums_state, sums_slab, last, salt, sum_)
        start = stop
    out += total
    return missing


@njit(cache=True, nogil=True)
def _total(out: Any) -> Any:
    total = np.int64(0)
    for j in range(out.size):
        total += np.int64(out[j])
    return total


@njit(cache=True, nogil=True)
def add_up(index: Any, keys: Any, referenced: Any, slab: Any, hashes: Any, salt: Any, tail: Any, out: Any) -> Any:
    """``gather`` on top of a tail, into whatever out holds; (hashes missing, sum over all cells)."""
    for j in range(out.size):
        out[j] = tail[j]
    missing = gather(index, keys, referenced, slab, hashes, salt, out)
    return missing, _total(out)


@njit(cache=True, nogil=True)
def add_up_chain(rows: Any, sums: Any, hashes: Any, salt: Any, total: Any, tail: Any, out: Any) -> Any:
    """``gather_chain`` as ``add_up``."""
    for j in range(out.size):
        out[j] = tail[j]
    missing = gather_chain(rows, sums, hashes, salt, total, out)
    return missing, _total(out)


@njit(cache=True, nogil=True)
def lacking(index: Any, keys: Any, hashes: Any, salt: Any) -> Any:
    out = np.empty(hashes.size, np.uint64)
    n = 0
    for i in range(hashes.size):
        _, row = find(index, keys, mix(hashes[i], salt))
        if row < 0:
            out[n] = hashes[i]
            n += 1
    return out[:n]


@njit(cache=True, nogil=True)
def remove(index: Any, keys: Any, freed: Any, state: Any, hashes: Any, salt: Any) -> Any:
    removed = 0
    for i in range(hashes.size):
        slot, row = find(index, keys, mix(hashes[i], salt))
        if row >= 0:
            vacate(index, keys, slot)
            freed[state[_FREED]] = row
            state[_FREED] += 1
            state[LIVE] -= 1
            removed += 1
    return removed
