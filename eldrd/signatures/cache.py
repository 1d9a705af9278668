"""Counts of KV blocks by block hash, within a budget of bytes. Numba kernels only: no sockets, frames or locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import njit

from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.uint8] | NDArray[np.uint16]

# Fields of a table's state vector, kept in an array because Numba kernels update it in place.
_FREED: Final = 0  # entries on the stack of freed rows
_USED: Final = 1  # rows ever handed out, the high-water mark
_HAND: Final = 2  # the clock's hand
_LIVE: Final = 3  # rows stored now

# Blocks between two checkpoints: fewer cost memory (a checkpoint is four rows), more cost time (rows left to add).
STRIDE: Final = 128
_CHECKPOINT_SHARE: Final = 16  # of the budget, one part

_INDEX_BYTES: Final = 16  # int32 slots, a power of two of at least twice the rows: at most four a row
_ROW_OVERHEAD: Final = _INDEX_BYTES + 8 + 4 + 1  # index, key, freed stack, reference bit


class SignatureCache:
    """Rows of expert counts, one per KV block, found by the block's 64-bit hash and evicted by CLOCK (second chance).

    The hashes of one call are those of a prompt's blocks in order, and each depends on all before it (vLLM's chain of
    block hashes). So the sum over a prompt's first blocks belongs to the hash of the last of them: every STRIDE blocks
    it is kept as a checkpoint, an int32 row under that hash, and the next prompt that begins alike adds only the rows
    behind it, however long it is. A checkpoint stays right when rows before it are evicted or removed, as another
    content would have another hash; it goes when it is evicted itself or its own hash is removed.

    budget_bytes covers rows, index and checkpoints (a sixteenth of it). Memory is reserved at the first insert and taken
    from the OS only as rows fill. Models whose rows look alike (same L * E and dtype) share one table, their keys kept
    apart by the model's fingerprint. A row layout not seen before splits the budget evenly over all layouts, which
    starts every table anew; ``clear`` forgets the layouts as well. Rows are uint8, or uint16 where a block holds 256
    tokens or more.

    Not thread safe: one thread owns it (the event loop's). Source: the signature cache of ELDR (arXiv 2607.00466).
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes is {budget_bytes}, expected more than 0")
        self._budget = budget_bytes
        self._tables: dict[tuple[int, np.dtype[Any]], _Table] = {}
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    def insert(self, geometry: Geometry, hashes: NDArray[np.uint64], counts: Counts) -> int:
        """Store counts [n, L * E] under hashes uint64 [n]; returns how many rows are new.

        A hash that is present keeps its row. n may exceed the capacity: the latest rows stay.
        Raises ValueError for a shape that is not the geometry's or a count that no block can have.
        """
        keys = _hashes(hashes)
        if counts.shape != (keys.size, geometry.width):
            raise ValueError(f"counts have shape {counts.shape}, expected {(keys.size, geometry.width)}")
        dtype = _dtype(geometry)
        if counts.dtype != dtype and counts.size and counts.max() > np.iinfo(dtype).max:
            raise ValueError(f"a count of {counts.max()} in a block of {geometry.block_size} tokens")
        t = self._tables.get((geometry.width, dtype)) or self._add_layout(geometry.width, dtype)
        rows = _plain(counts, dtype)
        new, evicted = _insert(t.index, t.keys, t.referenced, t.freed, t.state, t.slab, keys, _salt(geometry), rows)
        self._evictions += evicted
        return int(new)

    def gather(self, geometry: Geometry, hashes: NDArray[np.uint64], out: NDArray[np.int32]) -> int:
        """Add the rows of a prompt's hashes uint64 [n] into out int32 [L * E]; returns how many are not here, neither as
        a row nor as part of a checkpoint."""
        if out.shape != (geometry.width,) or out.dtype != np.int32 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, expected contiguous int32 {(geometry.width,)}")
        keys = _hashes(hashes)
        t = self._table(geometry)
        missing = keys.size
        if t is not None:
            if t.checkpoints is None or keys.size < STRIDE:
                missing = int(_gather(t.index, t.keys, t.referenced, t.slab, keys, _salt(geometry), out))
            else:
                missing = int(_gather_chain(t.arrays, t.checkpoints.all_arrays, keys, _salt(geometry), t.scratch, out))
        self._misses += missing
        self._hits += keys.size - missing
        return missing

    def lacking(self, geometry: Geometry, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Those of a prompt's hashes uint64 [n] that ``gather`` would miss, uint64 [m], in the order given."""
        keys = _hashes(hashes)
        table = self._table(geometry)
        if table is None:
            return keys.copy()
        start, salt = 0, _salt(geometry)
        if table.checkpoints is not None and keys.size >= STRIDE:
            start, _ = _latest(table.checkpoints.index, table.checkpoints.keys, keys, salt)
        lacking: NDArray[np.uint64] = _lacking(table.index, table.keys, keys[start:], salt)
        return lacking

    def remove(self, geometry: Geometry, hashes: NDArray[np.uint64]) -> int:
        """Drop hashes uint64 [n] (vLLM's BlockRemoved); returns how many were here."""
        t = self._table(geometry)
        if t is None:
            return 0
        keys, salt = _hashes(hashes), _salt(geometry)
        if (c := t.checkpoints) is not None:
            _remove(c.index, c.keys, c.freed, c.state, keys, salt)
        return int(_remove(t.index, t.keys, t.freed, t.state, keys, salt))

    def clear(self) -> None:
        """Drop everything and give the memory back; the counters go on."""
        self._tables.clear()

    def __len__(self) -> int:
        return sum(t.live for t in self._tables.values())

    @property
    def capacity(self) -> int:
        """Rows that fit, over all tables; 0 before the first insert tells how large a row is."""
        return sum(t.capacity for t in self._tables.values())

    @property
    def bytes(self) -> int:
        """Bytes of the rows and checkpoints stored now, with their share of the index."""
        tables = [t for rows in self._tables.values() for t in (rows, rows.checkpoints) if t is not None]
        return sum(t.live * t.row_bytes for t in tables)

    @property
    def checkpoints(self) -> int:
        """Checkpoints stored now."""
        return sum(t.checkpoints.live for t in self._tables.values() if t.checkpoints is not None)

    @property
    def hits(self) -> int:
        """Rows ``gather`` found or had in a checkpoint, ever."""
        return self._hits

    @property
    def misses(self) -> int:
        """Rows ``gather`` did not find, ever."""
        return self._misses

    @property
    def evictions(self) -> int:
        """Rows that made room for others, ever."""
        return self._evictions

    def _table(self, geometry: Geometry) -> _Table | None:
        return self._tables.get((geometry.width, _dtype(geometry)))

    def _add_layout(self, width: int, dtype: np.dtype[Any]) -> _Table:
        layouts = [*self._tables, (width, dtype)]
        self._tables.clear()  # before allocating: both generations together could exceed the budget
        for layout in layouts:
            budget = self._budget // len(layouts)
            share = budget // _CHECKPOINT_SHARE
            checkpoints = _Table(share, layout[0], np.dtype(np.int32))
            fit = checkpoints.row_bytes <= share
            self._tables[layout] = _Table(budget - share if fit else budget, *layout)
            self._tables[layout].checkpoints = checkpoints if fit else None
        return self._tables[width, dtype]


class _Table:
    """The arrays of one row layout. checkpoints: the layout's sums, None where the budget has no room for any."""

    def __init__(self, budget: int, width: int, dtype: np.dtype[Any]) -> None:
        self.row_bytes = width * dtype.itemsize + _ROW_OVERHEAD
        self.capacity = min(max(1, budget // self.row_bytes), 2**30)
        self.index = np.zeros(1 << (2 * self.capacity - 1).bit_length(), np.int32)  # row + 1; 0 is vacant
        self.keys = np.empty(self.capacity, np.uint64)
        self.referenced = np.zeros(self.capacity, np.uint8)
        self.freed = np.empty(self.capacity, np.int32)
        self.state = np.zeros(4, np.int64)
        self.slab = np.empty((self.capacity, width), dtype)
        self.arrays = (self.index, self.keys, self.referenced, self.slab)
        self.all_arrays = (*self.arrays, self.freed, self.state)
        self.scratch = np.empty(width, np.int32)
        self.checkpoints: _Table | None = None

    @property
    def live(self) -> int:
        return int(self.state[_LIVE])


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) every kernel for every dtype in use. Seconds when cold."""
    for block_size in (16, 256):
        geometry = Geometry("warm-up", 1, (0,), 8, 1, block_size)
        cache = SignatureCache(1 << 16)
        for n in (3, STRIDE):
            hashes = np.arange(n, dtype=np.uint64)
            cache.insert(geometry, hashes, np.ones((n, 8), _dtype(geometry)))
            cache.gather(geometry, hashes, np.zeros(8, np.int32))
            cache.lacking(geometry, hashes)
            cache.remove(geometry, hashes)


def _dtype(geometry: Geometry) -> np.dtype[Any]:
    return np.dtype(np.uint8 if geometry.block_size < 256 else np.uint16)


def _hashes(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys: NDArray[np.uint64] = _plain(hashes, np.dtype(np.uint64))
    return keys


def _plain(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A read-only, aligned, contiguous view, so that arrays over network buffers need no kernels of their own."""
    flags = array.flags
    if array.dtype != dtype or not (flags.c_contiguous and flags.aligned):
        array = np.require(array, dtype, ["C", "A"])
    view = array.view()
    view.flags.writeable = False
    return view


def _salt(geometry: Geometry) -> np.uint64:
    return np.uint64(geometry.fingerprint * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)


@njit(cache=True, nogil=True)
def _mix(block_hash: Any, salt: Any) -> Any:
    """The table's key of a block hash: splitmix64's finalizer, a bijection, so one model's hashes never collide."""
    x = block_hash ^ salt
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _find(index: Any, keys: Any, key: Any) -> Any:
    """(slot, row) of a key; row is -1 where it is absent, slot then being the vacant one it belongs in."""
    mask = np.uint64(index.size - 1)
    slot = np.int64(key & mask)
    while True:
        row = np.int64(index[slot]) - 1
        if row < 0 or keys[row] == key:
            return slot, row
        slot = (slot + 1) & np.int64(mask)


@njit(cache=True, nogil=True)
def _vacate(index: Any, keys: Any, slot: Any) -> None:
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
def _insert(
    index: Any, keys: Any, referenced: Any, freed: Any, state: Any, slab: Any, hashes: Any, salt: Any, counts: Any
) -> Any:
    new = 0
    evicted = 0
    for i in range(hashes.size):
        key = _mix(hashes[i], salt)
        slot, row = _find(index, keys, key)
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
            victim, _ = _find(index, keys, keys[row])
            _vacate(index, keys, victim)
            state[_LIVE] -= 1
            evicted += 1
            slot, _ = _find(index, keys, key)  # the shift may have moved the vacant slot
        keys[row] = key
        # A row earns its second chance by being read, so one long prompt cannot push out what others reuse.
        referenced[row] = 0
        index[slot] = row + 1
        slab[row, :] = counts[i, :]
        state[_LIVE] += 1
        new += 1
    return new, evicted


@njit(cache=True, nogil=True)
def _gather(index: Any, keys: Any, referenced: Any, slab: Any, hashes: Any, salt: Any, out: Any) -> Any:
    rows = np.empty(hashes.size, np.int64)
    found = 0
    for i in range(hashes.size):
        _, row = _find(index, keys, _mix(hashes[i], salt))
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
def _latest(index: Any, keys: Any, hashes: Any, salt: Any) -> Any:
    """(blocks covered, row) of the checkpoint that covers most of a prompt; (0, -1) without one."""
    covered = hashes.size - hashes.size % STRIDE
    while covered > 0:
        _, row = _find(index, keys, _mix(hashes[covered - 1], salt))
        if row >= 0:
            return covered, row
        covered -= STRIDE
    return 0, np.int64(-1)


@njit(cache=True, nogil=True)
def _gather_chain(rows: Any, sums: Any, hashes: Any, salt: Any, total: Any, out: Any) -> Any:
    """``_gather`` from the latest checkpoint on, leaving checkpoints behind. rows, sums: a table's and its checkpoints'
    arrays; total: int32 [L * E] to work in."""
    index, keys, referenced, slab = rows
    sums_index, sums_keys, sums_referenced, sums_slab, sums_freed, sums_state = sums
    start, row = _latest(sums_index, sums_keys, hashes, salt)
    if row >= 0:
        sums_referenced[row] = 1
        total[:] = sums_slab[row]
    else:
        total[:] = 0
    missing = 0
    while start < hashes.size:
        stop = min(start + STRIDE, hashes.size)
        missing += _gather(index, keys, referenced, slab, hashes[start:stop], salt, total)
        if missing == 0 and stop - start == STRIDE:
            last, sum_ = hashes[stop - 1 : stop], total.reshape(1, total.size)
            _insert(sums_index, sums_keys, sums_referenced, sums_freed, sums_state, sums_slab, last, salt, sum_)
        start = stop
    out += total
    return missing


@njit(cache=True, nogil=True)
def _lacking(index: Any, keys: Any, hashes: Any, salt: Any) -> Any:
    out = np.empty(hashes.size, np.uint64)
    n = 0
    for i in range(hashes.size):
        _, row = _find(index, keys, _mix(hashes[i], salt))
        if row < 0:
            out[n] = hashes[i]
            n += 1
    return out[:n]


@njit(cache=True, nogil=True)
def _remove(index: Any, keys: Any, freed: Any, state: Any, hashes: Any, salt: Any) -> Any:
    removed = 0
    for i in range(hashes.size):
        slot, row = _find(index, keys, _mix(hashes[i], salt))
        if row >= 0:
            _vacate(index, keys, slot)
            freed[state[_FREED]] = row
            state[_FREED] += 1
            state[_LIVE] -= 1
            removed += 1
    return removed
