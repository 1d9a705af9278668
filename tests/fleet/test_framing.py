"""Framing: heads, and the end of bodies wherever the pieces are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldrd.fleet.framing import BodyTracker, FramingError, dechunk, parse_head


def tracker(*fields: str, status: int = 200) -> BodyTracker:
    return BodyTracker(parse_head("\r\n".join([f"HTTP/1.1 {status} OK", *fields]).encode()))


def feed(t: BodyTracker, data: bytes, cuts: list[int]) -> int | None:
    """Feed ``data`` cut at these places; where in data the message ended."""
    edges = [0, *sorted({c for c in cuts if 0 < c < len(data)}), len(data)]
    for start, stop in pairwise(edges):
        end = t.feed(data[start:stop])
        if end >= 0:
            return start + end
    return None


chunks = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
extensions = st.sampled_from([b"", b";a=b", b' ; q="x"'])
trailers = st.sampled_from([b"", b"x-a: 1\r\n", b"x-a: 1\r\nx-b: 2\r\n"])


def chunked(parts: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in parts)
    return body + b"0\r\n" + trailer + b"\r\n"


@given(chunks, extensions, trailers, st.lists(st.integers(0, 400), max_size=30), st.binary(max_size=10))
def test_chunked_ends_where_it_ends(
    parts: list[bytes], extension: bytes, trailer: bytes, cuts: list[int], extra: bytes
) -> None:
    body = chunked(parts, extension, trailer)
    t = tracker("transfer-encoding: chunked")
    assert feed(t, body + extra, cuts) == len(body)
    assert t.chunks == len(parts)


@given(chunks, trailers)
def test_cut_at_every_byte(parts: list[bytes], trailer: bytes) -> None:
    body = chunked(parts, b"", trailer)
    for stop in range(len(body)):
        t = tracker("transfer-encoding: chunked")
        assert feed(t, body[:stop], list(range(stop))) is None
    t = tracker("transfer-encoding: chunked")
    assert feed(t, body, list(range(len(body)))) == len(body)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8))
def test_between_chunks(parts: list[bytes]) -> None:
    t = tracker("transfer-encoding: chunked")
    for part in parts:
        piece = b"%x\r\n%b\r\n" % (len(part), part)
        for byte in range(len(piece)):
            assert t.between_chunks == (byte == 0)
            assert t.feed(piece[byte : byte + 1]) == -1
    assert t.between_chunks


@given(chunks, trailers)
def test_dechunk(parts: list[bytes], trailer: bytes) -> None:
    assert dechunk(chunked(parts, b";x", trailer)) == b"".join(parts)


@given(st.integers(0, 300), st.lists(st.integers(0, 300), max_size=20), st.binary(max_size=10))
def test_declared_length(length: int, cuts: list[int], extra: bytes) -> None:
    t = tracker(f"content-length: {length}")
    assert t.length == length
    assert feed(t, b"x" * length + extra, cuts) == length


def test_without_length_the_connection_ends_it() -> None:
    t = tracker()
    assert t.ends_with_connection
    assert t.feed(b"anything") == -1


@pytest.mark.parametrize("status", [204, 304])
def test_no_body(status: int) -> None:
    t = tracker("content-length: 10", status=status)
    assert t.length == 0


@pytest.mark.parametrize(
    "body", [b"g\r\n", b"-1\r\n", b"0x5\r\n", b"1_0\r\n", b"+5\r\n", b"\r\n", b"5\n", b"1" * 20 + b"\r\n", b"a" * 5000]
)
def test_wrong_chunk_sizes(body: bytes) -> None:
    with pytest.raises(FramingError):
        tracker("transfer-encoding: chunked").feed(body)


@pytest.mark.parametrize(
    "fields",
    [
        ("content-length: -1",),
        ("content-length: +1",),
        ("content-length: 1", "content-length: 2"),
        ("transfer-encoding: gzip",),
        ("transfer-encoding: chunked", "content-length: 5"),
    ],
)
def test_wrong_framing_fields(fields: tuple[str, ...]) -> None:
    with pytest.raises(FramingError):
        tracker(*fields)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n: x",
        b"HTTP/1.1 200 OK\r\na b: x",
        b"HTTP/1.1 200 OK\r\na: x\x00y",
        b"HTTP/1.1 200 OK\r\n folded: x",
    ],
)
def test_wrong_heads(head: bytes) -> None:
    with pytest.raises(FramingError):
        parse_head(head)


def test_head() -> None:
    head = parse_head(
        b"HTTP/1.1 429 Too Many\r\nContent-Type:  text/plain \r\nConnection: close, X-Secret\r\nX-Secret: 1\r\n"
        b"Content-Length: 3\r\nTransfer-Encoding: x\r\nEmpty:"
    )
    assert (head.status, head.reason) == (429, b"Too Many")
    assert head.get(b"content-type") == b"text/plain"
    assert head.end_to_end == [(b"content-type", b"text/plain"), (b"empty", b"")]
    assert not head.keep_alive
    assert parse_head(b"HTTP/1.1 200").keep_alive
    assert not parse_head(b"HTTP/1.0 200 OK").keep_alive
