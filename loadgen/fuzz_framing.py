"""Coverage-guided fuzzing of eldrd.fleet.framing against a reference that is slow and obvious. Needs the extra `fuzz`.

    python -m loadgen.fuzz_framing -max_total_time=60 [corpus folder]

Options are libFuzzer's. An input is bytes of a body and the places to cut them at; whatever the cuts, the message must
end where the reference says, and what is malformed must be refused. tests/fuzz runs the same check on random inputs.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import TYPE_CHECKING, Final

from eldrd.fleet.events import ChunkDecoder, EventSplitter
from eldrd.fleet.framing import BodyTracker, FramingError, Head, dechunk, parse_new_head

if TYPE_CHECKING:
    from collections.abc import Callable

# Longer lines may be refused or not, by how they are cut: the limit is on what is held.
MAX_LINE: Final = 4_096
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[^\r\n]*)?")
_CHUNKED: Final = Head(1, 200, b"OK", [(b"transfer-encoding", b"chunked")])


def reference(data: bytes) -> int:
    """Where a chunked body that ``data`` begins with ends; -1 if it goes on. Raises FramingError."""
    pos = 0
    while True:
        line, found, rest = data[pos:].partition(b"\r\n")
        if not found:
            if b"\n" in line:
                raise FramingError("line feed alone")
            return -1
        size = _SIZE_LINE.fullmatch(line)
        if size is None:
            raise FramingError("chunk size")
        pos = len(data) - len(rest)
        n = int(size[1], 16)
        if n == 0:
            return _after_trailer(data, pos)
        pos += n + 2
        if pos >= len(data):
            return -1


def _after_trailer(data: bytes, pos: int) -> int:
    while True:
        line, found, rest = data[pos:].partition(b"\r\n")
        if not found:
            return -1
        pos = len(data) - len(rest)
        if not line:
            return pos


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut at these places."""
    edges = sorted({0, len(data), *(c for c in cuts if 0 < c < len(data))})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def tracked(data: bytes, cuts: list[int]) -> int:
    """What BodyTracker says of the cut bytes, as ``reference``. Raises FramingError."""
    tracker = BodyTracker(_CHUNKED)
    done = 0
    for piece in pieces(data, cuts):
        end = tracker.feed(piece)
        if end >= 0:
            assert 0 <= end <= len(piece), "an end outside of the piece"
            return done + end
        done += len(piece)
    return -1


def check(data: bytes, cuts: list[int]) -> None:
    """Raises AssertionError where tracker and reference differ, or what takes the coding off depends on the cuts."""
    if any(len(line) > MAX_LINE // 2 for line in data.split(b"\n")):
        return
    results: list[int | None] = []
    for judge in (reference, lambda d: tracked(d, []), lambda d: tracked(d, cuts)):
        try:
            results.append(judge(data))
        except FramingError:
            results.append(None)
    assert results[0] == results[1] == results[2], results
    end = results[0]
    if end is None or end < 0:
        return
    decoder = ChunkDecoder()
    payload = b"".join(decoder.feed(p) for p in pieces(data[:end], cuts))
    assert payload == dechunk(data[:end]), "payloads differ"
    whole = EventSplitter().feed(payload)
    splitter = EventSplitter()
    assert [e for p in pieces(payload, cuts) for e in splitter.feed(p)] == whole, "events differ"


def check_head(data: bytes) -> None:
    """Nothing but FramingError comes of any bytes, and what is accepted holds no line end."""
    try:
        head = parse_new_head(data)
        BodyTracker(head)
    except FramingError:
        return
    assert not any(c in part for field in (*head.fields, (head.reason, b"")) for part in field for c in b"\r\n\0")


def _one_input(data: bytes) -> None:
    import atheris

    provider = atheris.FuzzedDataProvider(data)
    cuts = provider.ConsumeIntListInRange(provider.ConsumeIntInRange(0, 12), 1, 400)
    if provider.ConsumeProbability() < 0.1:
        check_head(b"HTTP/1.1 " + provider.ConsumeBytes(4096))
    else:
        check(provider.ConsumeBytes(65_536), cuts)


def main() -> None:
    """Fuzz until libFuzzer's limits end it; its exit status is not 0 if anything was found."""
    import atheris

    checked: list[Callable[..., object]] = [
        parse_new_head,
        dechunk,
        BodyTracker.feed,
        BodyTracker._chunks,
        BodyTracker._trailer,
    ]
    checked += [ChunkDecoder.feed, EventSplitter.feed, reference, _after_trailer]
    for function in checked:
        atheris.instrument_func(function)
    atheris.Setup(sys.argv, _one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
