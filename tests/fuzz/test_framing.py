"""Random bytes cut at random places: the tracker of worker answers agrees with its slow reference; the fuzzer starts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.fuzz_framing import check, check_head, pieces

if TYPE_CHECKING:
    from pathlib import Path

# Bytes of which chunked bodies and events are made, so that random strings come near to valid ones.
PARTS = [
    b"0", b"1", b"2", b"5", b"a", b"10", b"F", b"g", b"-", b"+", b"_", b"0x", b";", b";x=y", b" ", b"\t", b"\r\n", b"\r\n",
    b"\r\n", b"\r", b"\n", b"0\r\n\r\n", b"data: ", b"data: [DONE]", b"\n\n", b"\r\n\r\n", b"x: y", b"\x00", b"\xff",
]  # fmt: skip
near = st.lists(st.sampled_from(PARTS), max_size=24).map(b"".join)


@st.composite
def valid(draw: st.DrawFn) -> bytes:
    """A whole chunked body with extensions and trailers, something after it, and perhaps one byte changed."""
    chunks = draw(st.lists(st.one_of(near, st.binary(max_size=40)).filter(len), max_size=6))
    extension = draw(st.sampled_from([b"", b";a", b' ;b="c"', b"\t"]))
    trailer = draw(st.sampled_from([b"", b"x: y\r\n", b"x: y\r\nz: 0\r\n"]))
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks) + b"0\r\n" + trailer + b"\r\n"
    body += draw(st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n"]))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + draw(st.one_of(st.just(b""), st.binary(min_size=1, max_size=2))) + body[at + 1 :]
    return body


@settings(max_examples=600, deadline=None)
@given(st.one_of(near, valid(), st.binary(max_size=60)), st.lists(st.integers(1, 200), max_size=20))
def test_cuts_change_nothing(data: bytes, cuts: list[int]) -> None:
    check(data, cuts)


@settings(max_examples=150, deadline=None)
@given(valid())
def test_cut_at_every_byte(data: bytes) -> None:
    check(data, list(range(len(data))))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=80), near), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK"]))
def test_heads(data: bytes, start: bytes) -> None:
    check_head(start + data)


def test_pieces_are_the_whole() -> None:
    assert pieces(b"abcdef", [2, 4, 4, 9, 0]) == [b"ab", b"cd", b"ef"]
    assert pieces(b"", [1]) == []


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs the extra fuzz")
def test_coverage_guided_for_a_moment(tmp_path: Path) -> None:
    limits = ["-runs=20000", "-max_total_time=10", f"-artifact_prefix={tmp_path}/"]
    command = [sys.executable, "-m", "loadgen.fuzz_framing", *limits]
    done = subprocess.run(command, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert b"Done" in done.stderr
