"""The frames between this hook and eldrd, from the hook's side. A codec only: no sockets, no state, nothing of vLLM.

The format is eldrd's (``eldrd/signatures/wire.py`` describes it); this side encodes what a hook says and decodes what
a daemon says. Golden frames in the tests keep both ends byte for byte the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VERSION = 1
HASH = np.dtype("<u8")
DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {
    "u1": np.dtype("u1"),
    "u2": np.dtype("<u2"),
    "u4": np.dtype("<u4"),
}


class WireError(ValueError):
    """A message that does not follow the format."""


class Hello(msgspec.Struct, tag="hello", tag_field="t", frozen=True):
    """Who this hook is and what it counts; the fields are those of eldrd's Hello."""

    v: int
    hook: str
    worker: str
    phase: str
    model: str
    fingerprint: int
    layers: list[int]
    experts: int
    top_k: int
    block_size: int
    hash_algo: str


class Blocks(msgspec.Struct, tag="blocks", tag_field="t", frozen=True):
    """Counts of n complete hash blocks; frames: hashes ``<u8`` [n], counts ``dtype`` [n, L * E]."""

    v: int
    seq: int
    n: int
    dtype: str


class Request(msgspec.Struct, tag="request", tag_field="t", frozen=True):
    """One prefilled prompt; frames: hashes ``<u8`` [blocks], counts of the tail ``dtype`` [L * E]."""

    v: int
    seq: int
    id: str
    tokens: int
    blocks: int
    tail: int
    partial: bool
    dtype: str


class Decoded(msgspec.Struct, tag="decoded", tag_field="t", frozen=True):
    """The end of a request: how many generated tokens were counted; frame: their counts ``dtype`` [L * E]."""

    v: int
    seq: int
    id: str
    tokens: int
    dtype: str


class Steps(msgspec.Struct, tag="steps", tag_field="t", frozen=True):
    """Totals over the steps that decoded, since the hook started; the fields are those of eldrd's Steps."""

    v: int
    seq: int
    steps: int
    requests: int
    tokens: int
    active: int
    missed: int


class Want(msgspec.Struct, tag="want", tag_field="t", frozen=True):
    """The daemon lacks n rows; frame: hashes ``<u8`` [n]."""

    v: int
    n: int


class Who(msgspec.Struct, tag="who", tag_field="t", frozen=True):
    """The daemon does not know this connection and waits for a hello."""

    v: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Want | Who] = msgspec.msgpack.Decoder(Want | Who)


def dtype_for(block_size: int) -> str:
    """The count type of a block's row that cannot overflow: a token chooses an expert at most once a layer."""
    return "u1" if block_size < 256 else "u2"


def dtype_of_decoded(tokens: int) -> str:
    """The count type of that many generated tokens."""
    return "u2" if tokens < 1 << 16 else "u4"


def encode(header: Hello | Blocks | Request | Decoded | Steps, *arrays: NDArray[np.generic]) -> list[bytes]:
    """The multipart message of ``header`` and its arrays, which already have the dtypes of the format."""
    return [_encoder.encode(header), *(np.ascontiguousarray(a).tobytes() for a in arrays)]


def decode(frames: Sequence[bytes]) -> Who | NDArray[np.uint64]:
    """A daemon's message: ``who``, or the wanted hashes uint64 [n]. Raises WireError."""
    if not frames:
        raise WireError("empty message")
    try:
        header = _decoder.decode(frames[0])
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise WireError(f"header: {e}") from None
    if header.v != VERSION:
        raise WireError(f"version {header.v}, this side speaks {VERSION}")
    if isinstance(header, Who):
        return header
    if len(frames) != 2 or len(frames[1]) != header.n * HASH.itemsize:
        raise WireError(f"expected {header.n} hashes")
    return np.frombuffer(frames[1], HASH)
