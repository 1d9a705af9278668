"""Memory taken from the OS ahead of its use, by a thread of its own. Knows no rows and writes nothing.

NumPy asks for huge pages, and the first touch of one makes the kernel clear 2 MiB: 0.2 ms, or 5 ms in a virtual machine whose
host has no memory behind it yet. That would be the event loop's time.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

# More than the rows of a prompt of 128k tokens, which may come all at once.
_AHEAD: Final = 64 << 20
# A page at a time: whoever maps memory meanwhile waits for one.
_PIECE: Final = 2 << 20
_PAGE: Final = 4096
_POPULATE_WRITE: Final = 23  # madvise(2), Linux 5.14
_madvise: Final = ctypes.CDLL(None).madvise if sys.platform == "linux" else None


class Ahead:
    """Of an array that is filled from its start: some _AHEAD bytes behind what is used are always in memory, where the kernel
    can do that (elsewhere pages are taken at their first touch). whole: arrays that are used all over from the beginning."""

    def __init__(self, array: NDArray[Any], *whole: NDArray[Any]) -> None:
        self._array = array
        self._asked = min(_AHEAD, array.nbytes)
        pieces = [(a, 0, a.nbytes) for a in whole]
        self._start(*pieces, (array, 0, self._asked))

    def used(self, nbytes: int) -> None:
        """So many bytes are in use; to be told as they grow. Cheap while enough lies ahead."""
        if nbytes + _AHEAD // 2 <= self._asked or self._asked >= self._array.nbytes:
            return
        start, self._asked = self._asked, min(nbytes + _AHEAD, self._array.nbytes)
        self._start((self._array, start, self._asked))

    def _start(self, *pieces: tuple[NDArray[Any], int, int]) -> None:
        threading.Thread(target=_populate, args=pieces, name="memory", daemon=True).start()


def _populate(*pieces: tuple[NDArray[Any], int, int]) -> None:
    """Put the bytes from start to stop of arrays into memory, as they are. ctypes lets the GIL go meanwhile."""
    if _madvise is None:
        return
    for array, start, stop in pieces:
        first = array.ctypes.data
        at, end = (first + start) & -_PAGE, first + stop
        while at < end:
            size = min(_PIECE - at % _PIECE, end - at)
            if _madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), _POPULATE_WRITE):
                return
            at += size
