"""Memory ahead of its use: what is in memory, and that nothing is written."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eldrd.signatures import memory
from eldrd.signatures.cache import SignatureCache
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise(MADV_POPULATE_WRITE)")
GEOMETRY = Geometry("m", 1, tuple(range(48)), 128, 8, 16)


def resident(array: NDArray[Any]) -> int:
    """How many bytes of an array are in memory (mincore(2)), to the page."""
    first = array.ctypes.data & -mmap.PAGESIZE
    pages = -(-(array.ctypes.data + array.nbytes - first) // mmap.PAGESIZE)
    seen = np.zeros(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert libc.mincore(ctypes.c_void_p(first), length, ctypes.c_void_p(seen.ctypes.data)) == 0
    return int((seen & 1).sum()) * mmap.PAGESIZE


def populated() -> None:
    """Wait until no thread takes memory any more."""
    end = time.monotonic() + 60
    while any(t.name == "memory" for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_lies_ahead_is_in_memory_and_no_more() -> None:
    array = np.empty(512 << 20, np.uint8)
    ahead = memory.Ahead(array)
    populated()
    first = resident(array)
    assert 60 << 20 < first < 80 << 20
    ahead.used(10 << 20)
    populated()
    assert resident(array) < first + (4 << 20)
    ahead.used(100 << 20)
    populated()
    assert 160 << 20 < resident(array) < 180 << 20
    ahead.used(array.nbytes)
    populated()
    assert resident(array) > 500 << 20


def test_nothing_is_written() -> None:
    array = np.arange(1 << 20, dtype=np.int64)
    memory.Ahead(array, array[5:])
    populated()
    assert np.array_equal(array, np.arange(1 << 20))


def test_a_reserved_cache_has_memory_before_its_first_row() -> None:
    cache = SignatureCache(64 << 20)
    cache.reserve(GEOMETRY)
    populated()
    assert sum(resident(t.slab) for t in cache._tables.values()) > 55 << 20
    assert (cache.capacity > 0, len(cache), cache.bytes) == (True, 0, 0)


def test_reserving_for_another_layout_keeps_the_rows() -> None:
    cache = SignatureCache(64 << 20)
    hashes = np.arange(3, dtype=np.uint64)
    cache.insert(GEOMETRY, hashes, np.ones((3, GEOMETRY.width), np.uint8))
    cache.reserve(Geometry("other", 2, (0,), 8, 1, 16))
    assert cache.lacking(GEOMETRY, hashes).size == 0
    populated()
