"""Counts of KV blocks by block hash, within a budget of bytes. kernels.py touches the rows; no sockets, frames or locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eldrd.signatures import kernels
from eldrd.signatures.geometry import Geometry
from eldrd.signatures.kernels import LIVE, STRIDE
from eldrd.signatures.memory import Ahead

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.uint8] | NDArray[np.uint16]

_CHECKPOINT_SHARE: Final = 16  # of the budget, one part

_NOTHING: Final = (None, None, np.uint64(0))

# NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_ALIGNED without NPY_ARRAY_WRITEABLE, as of an array over bytes.
_PLAIN: Final = 0x0001 | 0x0100
_PLAIN_FLAGS: Final = _PLAIN | 0x0400

_INDEX_BYTES: Final = 16  # int32 slots, a power of two of at least twice the rows: at most four a row
_ROW_OVERHEAD: Final = _INDEX_BYTES + 8 + 4 + 1  # index, key, freed stack, reference bit


class SignatureCache:
    """Rows of expert counts, one per KV block, found by the block's 64-bit hash and evicted by CLOCK (second chance).

    The hashes of one call are those of a prompt's blocks in order, and each depends on all before it (vLLM's chain of
    block hashes). So the sum over a prompt's first blocks belongs to the hash of the last of them: every STRIDE blocks
    it is kept as a checkpoint, an int32 row under that hash, and the next prompt that begins alike adds only the rows
    behind it, however long it is. A checkpoint stays right when rows before it are evicted or removed, as another
    content would have another hash; it goes when it is evicted itself or its own hash is removed.

    budget_bytes covers rows, index and checkpoints (a sixteenth of it). ``reserve`` or the first insert reserves memory, and
    it is taken from the OS only as rows fill, a little ahead of them. Models whose rows look alike (same L * E and dtype)
    share one table, their keys kept apart by the model's fingerprint. A row layout not seen before splits the budget evenly
    over all layouts, which starts every table anew; ``clear`` forgets the layouts as well. Rows are uint8, or uint16 where
    a block holds 256 tokens or more.

    Not thread safe: one thread owns it (the event loop's). Source: the signature cache of ELDR (arXiv 2607.00466).
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes is {budget_bytes}, expected more than 0")
        self._budget = budget_bytes
        self._tables: dict[tuple[int, np.dtype[Any]], _Table] = {}
        # Of the geometry whose prompt was added up last: finding these costs as much as adding up a few rows.
        self._latest: tuple[Geometry | None, _Table | None, np.uint64] = _NOTHING
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    def reserve(self, geometry: Geometry) -> None:
        """Rows of this geometry will come: get the memory of the first ones ready by then, as far as a thread can. Changes
        nothing where a row layout is known."""
        if not self._tables:
            self._add_layout(geometry.width, _dtype(geometry))

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
        new, evicted = kernels.insert(
            t.index, t.keys, t.referenced, t.freed, t.state, t.slab, keys, _salt(geometry), rows
        )
        self._evictions += evicted
        t.take_ahead()
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
                missing = int(kernels.gather(t.index, t.keys, t.referenced, t.slab, keys, _salt(geometry), out))
            else:
                missing = int(
                    kernels.gather_chain(t.arrays, t.checkpoints.all_arrays, keys, _salt(geometry), t.scratch, out)
                )
                t.checkpoints.take_ahead()
        self._misses += missing
        self._hits += keys.size - missing
        return missing

    def add_up(
        self, geometry: Geometry, hashes: NDArray[np.uint64], tail: NDArray[np.unsignedinteger[Any]]
    ) -> tuple[NDArray[np.int32], int, int]:
        """A whole prompt's counts in one kernel: int32 [L * E], the rows of its hashes uint64 [n] and ``tail`` [L * E]
        (uint8, uint16 or uint32) together; how many rows are not here; and the sum over all cells."""
        if tail.shape != (geometry.width,):
            raise ValueError(f"tail has shape {tail.shape}, expected {(geometry.width,)}")
        out = np.empty(geometry.width, np.int32)
        keys = _hashes(hashes)
        known, t, salt = self._latest
        if known is not geometry:
            t, salt = self._table(geometry), _salt(geometry)
            self._latest = geometry, t, salt
        if t is None or tail.dtype.itemsize > 2:
            out[:] = tail
            missing = self.gather(geometry, keys, out)
            return out, missing, int(out.sum(dtype=np.int64))
        start = _plain(tail, tail.dtype)
        if t.checkpoints is None or keys.size < STRIDE:
            missing, total = kernels.add_up(t.index, t.keys, t.referenced, t.slab, keys, salt, start, out)
        else:
            missing, total = kernels.add_up_chain(t.arrays, t.checkpoints.all_arrays, keys, salt, t.scratch, start, out)
            t.checkpoints.take_ahead()
        self._misses += missing
        self._hits += keys.size - missing
        return out, missing, total

    def lacking(self, geometry: Geometry, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Those of a prompt's hashes uint64 [n] that ``gather`` would miss, uint64 [m], in the order given."""
        keys = _hashes(hashes)
        table = self._table(geometry)
        if table is None:
            return keys.copy()
        start, salt = 0, _salt(geometry)
        if table.checkpoints is not None and keys.size >= STRIDE:
            start, _ = kernels.latest(table.checkpoints.index, table.checkpoints.keys, keys, salt)
        lacking: NDArray[np.uint64] = kernels.lacking(table.index, table.keys, keys[start:], salt)
        return lacking

    def remove(self, geometry: Geometry, hashes: NDArray[np.uint64]) -> int:
        """Drop hashes uint64 [n] (vLLM's BlockRemoved); returns how many were here."""
        t = self._table(geometry)
        if t is None:
            return 0
        keys, salt = _hashes(hashes), _salt(geometry)
        if (c := t.checkpoints) is not None:
            kernels.remove(c.index, c.keys, c.freed, c.state, keys, salt)
        return int(kernels.remove(t.index, t.keys, t.freed, t.state, keys, salt))

    def clear(self) -> None:
        """Drop everything and give the memory back; the counters go on."""
        self._tables.clear()
        self._latest = _NOTHING

    def __len__(self) -> int:
        return sum(t.live for t in self._tables.values())

    @property
    def capacity(self) -> int:
        """Rows that fit, over all tables; 0 before ``reserve`` or the first insert tells how large a row is."""
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
        self._latest = _NOTHING
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
        self._ahead = Ahead(self.slab, self.index, self.keys, self.referenced)
        self.arrays = (self.index, self.keys, self.referenced, self.slab)
        self.all_arrays = (*self.arrays, self.freed, self.state)
        self.scratch = np.empty(width, np.int32)
        self.checkpoints: _Table | None = None

    @property
    def live(self) -> int:
        return int(self.state[LIVE])

    def take_ahead(self) -> None:
        """See that the rows handed out next are in memory. None is untouched while freed ones are left, so those stored
        now are all that were ever handed out when the next untouched one is."""
        self._ahead.used(self.live * self.slab.strides[0])


def warm_up() -> None:
    """Compile (or load from Numba's cache on disk) every kernel for every dtype in use. Seconds when cold."""
    for block_size in (16, 256):
        geometry = Geometry("warm-up", 1, (0,), 8, 1, block_size)
        cache = SignatureCache(1 << 16)
        for n in (3, STRIDE):
            hashes = np.arange(n, dtype=np.uint64)
            cache.insert(geometry, hashes, np.ones((n, 8), _dtype(geometry)))
            cache.gather(geometry, hashes, np.zeros(8, np.int32))
            for tail in (np.uint8, np.uint16):
                cache.add_up(geometry, hashes, np.zeros(8, tail))
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
    if flags.num & _PLAIN_FLAGS == _PLAIN and array.dtype == dtype:
        return array
    if array.dtype != dtype or not (flags.c_contiguous and flags.aligned):
        array = np.require(array, dtype, ["C", "A"])
    view = array.view()
    view.flags.writeable = False
    return view


def _salt(geometry: Geometry) -> np.uint64:
    return np.uint64(geometry.fingerprint * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
