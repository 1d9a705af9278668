"""Frames between the vLLM hook and eldrd: encoding and decoding only, no sockets, no cache.

A message is a ZMQ multipart: a msgpack header (tagged by ``t``, versioned by ``v``) and raw little-endian arrays.

=========  =================  =====================================================================================
``t``      from               frames after the header
=========  =================  =====================================================================================
hello      hook               none; sent on connect, every few seconds, and as the answer to ``who``
blocks     hook               hashes ``<u8`` [n]; counts ``dtype`` [n, L, E]
request    hook               hashes of the prompt's full blocks ``<u8`` [blocks]; counts of the tail ``dtype`` [L, E]
decoded    hook               counts of the generated tokens ``dtype`` [L, E]
steps      hook               none; totals of the engine's decode steps, about once a second while there are any
want       eldrd              hashes ``<u8`` [n] that the hook shall send again, as far as it still has them
who        eldrd              none; the peer is unknown here (eldrd restarted): send hello
=========  =================  =====================================================================================

A block hash is the low 64 bits of vLLM's block hash, the same integer as in vLLM's KV events.
The hook's distribution has a codec of its own (it imports nothing of eldrd); golden frames keep both equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from eldrd.signatures.zmtp import Frame

VERSION = 1
DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "u1": np.dtype(np.uint8),
    "u2": np.dtype("<u2"),
    "u4": np.dtype("<u4"),
}
HASH = np.dtype("<u8")


class WireError(ValueError):
    """A frame that does not follow the format; the message says what is wrong with it."""


class Hello(msgspec.Struct, tag="hello", tag_field="t", frozen=True):
    """Who the hook is and what it counts. phase: ``prefill`` (prompts), ``decode`` (generated tokens) or ``both``."""

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

    def geometry(self) -> Geometry:
        return Geometry(
            model=self.model,
            fingerprint=self.fingerprint,
            layers=tuple(self.layers),
            experts=self.experts,
            top_k=self.top_k,
            block_size=self.block_size,
            hash_algo=self.hash_algo,
        )


class Blocks(msgspec.Struct, tag="blocks", tag_field="t", frozen=True):
    """Counts of n complete hash blocks. seq: per-connection message number of the hook; a gap means lost frames."""

    v: int
    seq: int
    n: int
    dtype: str


class Request(msgspec.Struct, tag="request", tag_field="t", frozen=True):
    """One prefilled request. id: the ``eldr_id`` given in kv_transfer_params; tokens: prompt length; blocks: full hash
    blocks of the prompt; tail: tokens after the last full block; partial: the hook itself could not count all."""

    v: int
    seq: int
    id: str
    tokens: int
    blocks: int
    tail: int
    partial: bool
    dtype: str


class Decoded(msgspec.Struct, tag="decoded", tag_field="t", frozen=True):
    """The end of a request. id: as in Request; tokens: generated tokens that were counted, all but the last one, which no
    step has computed."""

    v: int
    seq: int
    id: str
    tokens: int
    dtype: str


class Steps(msgspec.Struct, tag="steps", tag_field="t", frozen=True):
    """Totals since the hook started, so that a lost message loses nothing, over steps that decode: that compute one token
    of at least one request whose prompt is behind it.

    steps: those counted; requests, tokens: what they computed, prefill that was mixed in included; active: distinct
    experts that a step's tokens selected in a layer, summed over MoE layers and steps; missed: decode steps whose expert
    ids were lost and that are in none of the others.
    """

    v: int
    seq: int
    steps: int
    requests: int
    tokens: int
    active: int
    missed: int


class Want(msgspec.Struct, tag="want", tag_field="t", frozen=True):
    """eldrd lacks n rows."""

    v: int
    n: int


class Who(msgspec.Struct, tag="who", tag_field="t", frozen=True):
    """eldrd does not know this peer."""

    v: int


Header = Hello | Blocks | Request | Decoded | Steps | Want | Who
_decoder = msgspec.msgpack.Decoder(Header)
_encoder = msgspec.msgpack.Encoder()


def encode(header: Header, *arrays: NDArray[np.generic]) -> list[bytes]:
    """The multipart message of ``header`` and its arrays, which must already have the dtypes of the format."""
    return [_encoder.encode(header), *(np.ascontiguousarray(a).tobytes() for a in arrays)]


def decode_header(frame: Frame) -> Header:
    """The header of a message. Raises WireError for anything that is not a version-1 header."""
    try:
        header: Header = _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise WireError(f"header: {e}") from None
    if header.v != VERSION:
        raise WireError(f"version {header.v}, this side speaks {VERSION}")
    return header


def hashes(frames: Sequence[Frame], n: int) -> NDArray[np.uint64]:
    """The hashes of a blocks, request or want message: uint64 [n]."""
    if len(frames) < 2 or len(frames[1]) != n * HASH.itemsize:
        raise WireError(f"expected {n} hashes")
    return np.frombuffer(frames[1], HASH)


def counts(
    frames: Sequence[Frame], n: int, dtype: str, geometry: Geometry, at: int = 2
) -> NDArray[np.unsignedinteger[Any]]:
    """The counts of a blocks (n rows), request (one row) or decoded (one row, in frame 1) message: ``dtype`` [n, L * E].

    at: the frame that holds them.
    """
    dt = DTYPES.get(dtype)
    if dt is None:
        raise WireError(f"dtype {dtype!r}, expected one of {sorted(DTYPES)}")
    if len(frames) <= at or len(frames[at]) != n * geometry.width * dt.itemsize:
        raise WireError(f"expected {n} x {geometry.width} counts of {dtype}")
    return np.frombuffer(frames[at], dt).reshape(n, geometry.width)
