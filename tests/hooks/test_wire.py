"""The hook's codec: golden frames, and byte for byte what eldrd's own codec writes and reads."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from eldrd_hook import wire as hook

from eldrd.signatures import wire as daemon

HELLO = {
    "v": 1,
    "hook": "0.1.0",
    "worker": "p0",
    "phase": "prefill",
    "model": "tiny",
    "fingerprint": (1 << 64) - 2,
    "layers": [0, 2, 3],
    "experts": 4,
    "top_k": 2,
    "block_size": 32,
    "hash_algo": "sha256",
}
BLOCKS = {"v": 1, "seq": 7, "n": 2, "dtype": "u1"}
REQUEST = {"v": 1, "seq": 8, "id": "r-1", "tokens": 70, "blocks": 2, "tail": 6, "partial": False, "dtype": "u2"}
DECODED = {"v": 1, "seq": 9, "id": "r-1", "tokens": 70_000, "dtype": "u4"}
STEPS = {"v": 1, "seq": 10, "steps": 1000, "requests": 8000, "tokens": 8300, "active": 1 << 33, "missed": 2}
GOLDEN = {
    "Hello": (
        "8ca174a568656c6c6fa17601a4686f6f6ba5302e312e30a6776f726b6572a27030a57068617365a770726566696c6ca56d6f"
        "64656ca474696e79ab66696e6765727072696e74cffffffffffffffffea66c617965727393000203a76578706572747304a5"
        "746f705f6b02aa626c6f636b5f73697a6520a9686173685f616c676fa6736861323536"
    ),
    "Blocks": "85a174a6626c6f636b73a17601a373657107a16e02a56474797065a27531",
    "Request": (
        "89a174a772657175657374a17601a373657108a26964a3722d31a6746f6b656e7346a6626c6f636b7302a47461696c06a770"
        "61727469616cc2a56474797065a27532"
    ),
    "Decoded": "86a174a76465636f646564a17601a373657109a26964a3722d31a6746f6b656e73ce00011170a56474797065a27534",
    "Steps": (
        "88a174a57374657073a17601a37365710aa57374657073cd03e8a87265717565737473cd1f40a6746f6b656e73cd206ca661"
        "6374697665cf0000000200000000a66d697373656402"
    ),
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("Hello", HELLO), ("Blocks", BLOCKS), ("Request", REQUEST), ("Decoded", DECODED), ("Steps", STEPS)],
)
def test_headers_are_golden_and_equal_on_both_sides(kind: str, fields: dict[str, object]) -> None:
    [ours] = hook.encode(getattr(hook, kind)(**fields))
    [theirs] = daemon.encode(getattr(daemon, kind)(**fields))
    assert ours.hex() == theirs.hex() == GOLDEN[kind]
    assert msgspec.structs.asdict(daemon.decode_header(ours)) == fields


def test_arrays_are_read_as_they_were_written() -> None:
    geometry = daemon.Hello(**HELLO).geometry()
    hashes = np.array([1, (1 << 64) - 1], hook.HASH)
    counts = np.arange(24, dtype=np.uint8).reshape(2, 12)
    frames = hook.encode(hook.Blocks(**BLOCKS), hashes, counts)
    assert frames[1].hex() == "0100000000000000ffffffffffffffff"
    np.testing.assert_array_equal(daemon.hashes(frames, 2), hashes)
    np.testing.assert_array_equal(daemon.counts(frames, 2, "u1", geometry), counts)
    assert hook.DTYPES == daemon.DTYPES


def test_decoded_counts_are_read_as_they_were_written() -> None:
    geometry = daemon.Hello(**HELLO).geometry()
    counts = np.arange(12, dtype="<u4") * 100_000
    frames = hook.encode(hook.Decoded(**DECODED), counts)
    assert frames[1].hex().startswith("00000000a0860100")
    np.testing.assert_array_equal(daemon.counts(frames, 1, "u4", geometry, at=1), counts[None])
    assert [hook.dtype_of_decoded(n) for n in (0, 65_535, 65_536)] == ["u2", "u2", "u4"]


def test_daemon_messages() -> None:
    assert isinstance(hook.decode(daemon.encode(daemon.Who(1))), hook.Who)
    wanted = hook.decode(daemon.encode(daemon.Want(1, 2), np.array([5, 6], daemon.HASH)))
    assert not isinstance(wanted, hook.Who)
    assert wanted.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "empty"),
        ([b"\xff\xff"], "header"),
        (daemon.encode(daemon.Blocks(**BLOCKS)), "header"),
        (daemon.encode(daemon.Who(2)), "version 2"),
        (daemon.encode(daemon.Want(1, 2)), "expected 2 hashes"),
        (daemon.encode(daemon.Want(1, 2), np.zeros(3, daemon.HASH)), "expected 2 hashes"),
    ],
)
def test_anything_else_is_refused(frames: list[bytes], why: str) -> None:
    with pytest.raises(hook.WireError, match=why):
        hook.decode(frames)
