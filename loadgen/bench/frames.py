"""Signatures for the benches: what the C mock pushes as a hook, and a partition fitted to them. Opens no socket.

Geometry of Qwen3-30B-A3B: 48 MoE layers x 128 experts, top-8. Every prompt has all its full blocks in P's prefix cache,
so a request costs one frame; the rows themselves are pushed once, when the mock connects.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eldrd.partitions import file as partition_file
from eldrd.partitions.fit import fit
from eldrd.signatures import wire
from eldrd.signatures.capture import Capture
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

GEOMETRY: Final = Geometry("mock", 1, tuple(range(48)), 128, 8, 16)
PROMPTS: Final = 64
BLOCKS: Final = 8
TAIL: Final = 7
_DOMAINS: Final = 8
_ID: Final = "i" * 32
_SEQ: Final = 0x71727374


@dataclass(frozen=True, slots=True)
class Prompts:
    """hashes: uint64 [P, B] of each prompt's full blocks; rows: uint8 [P, B, L * E]; tails: uint8 [P, L * E], the counts of
    the ``tail`` tokens behind them."""

    hashes: NDArray[np.uint64]
    rows: NDArray[np.uint8]
    tails: NDArray[np.uint8]
    tail: int

    @property
    def blocks(self) -> int:
        """Full blocks of each prompt."""
        return int(self.hashes.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens of each prompt."""
        return self.blocks * GEOMETRY.block_size + self.tail

    def signatures(self) -> NDArray[np.int32]:
        """int32 [P, L, E]: the expert counts of each prompt."""
        total: NDArray[np.int32] = self.rows.sum(axis=1, dtype=np.int32) + self.tails
        return total.reshape(-1, *GEOMETRY.shape)


def prompts(blocks: int = BLOCKS, tail: int = TAIL, seed: int = 0) -> Prompts:
    """Prompts of so many full blocks and ``tail`` tokens, of a few domains, each of which prefers other experts."""
    rng = np.random.default_rng(seed)
    layers, experts = GEOMETRY.shape
    weights = rng.gamma(0.3, size=(_DOMAINS, layers, experts)) + 1e-3
    rows = np.empty((PROMPTS, blocks, GEOMETRY.width), np.uint8)
    tails = np.empty((PROMPTS, GEOMETRY.width), np.uint8)
    for p in range(PROMPTS):
        preference = weights[p % _DOMAINS]
        for b in range(blocks):
            rows[p, b] = _counts(rng, preference, GEOMETRY.block_size)
        tails[p] = _counts(rng, preference, tail)
    return Prompts(rng.integers(1, 2**63, (PROMPTS, blocks), dtype=np.uint64), rows, tails, tail)


def _counts(rng: np.random.Generator, weights: NDArray[np.float64], tokens: int) -> NDArray[np.uint8]:
    """Counts uint8 [L * E] of ``tokens`` tokens that each choose top_k different experts in every layer."""
    layers, experts = weights.shape
    # The k largest of log-weight plus Gumbel noise are a weighted draw without replacement.
    keys = np.log(weights) + rng.gumbel(size=(tokens, layers, experts))
    chosen = np.argpartition(keys, -GEOMETRY.top_k, axis=2)[:, :, -GEOMETRY.top_k :]
    counts = np.zeros((layers, experts), np.uint8)
    np.add.at(counts, (np.arange(layers)[None, :, None], chosen), 1)
    return counts.reshape(-1)


def write_partition(p: Prompts, workers: Sequence[str], path: Path) -> None:
    """Fit a partition for these decode workers to the prompts' signatures."""
    tokens = np.full(PROMPTS, p.tokens, np.int32)
    capture = Capture(GEOMETRY, p.signatures(), tokens, np.full(PROMPTS, 16, np.int32), [None] * PROMPTS)
    partition_file.save(fit(capture, workers), path)


def write_frames(p: Prompts, path: Path) -> None:
    """The mock's messages, in the format that native/hook.c reads."""
    blocks = wire.Blocks(v=wire.VERSION, seq=1, n=p.hashes.size, dtype="u1")
    preamble = hello() + message(wire.encode(blocks, p.hashes, p.rows))
    header: dict[str, Any] = {"v": wire.VERSION, "seq": _SEQ, "id": _ID, "blocks": p.blocks, "tail": p.tail}
    request = wire.Request(**header, tokens=p.tokens, partial=False, dtype="u1")
    messages = [message(wire.encode(request, p.hashes[i], p.tails[i])) for i in range(PROMPTS)]
    size = len(messages[0])
    assert all(len(m) == size for m in messages)
    offsets = (messages[0].index(_ID.encode()), messages[0].index(struct.pack(">I", _SEQ)))
    parts = [part for bytes_ in (handshake(), preamble) for part in (struct.pack("<I", len(bytes_)), bytes_)]
    path.write_bytes(b"".join([*parts, struct.pack("<4I", PROMPTS, size, *offsets), *messages]))


def hello() -> bytes:
    """A prefill hook's first message."""
    said = wire.Hello(
        v=wire.VERSION,
        hook="bench",
        worker="p0",
        phase="prefill",
        model=GEOMETRY.model,
        fingerprint=GEOMETRY.fingerprint,
        layers=list(GEOMETRY.layers),
        experts=GEOMETRY.experts,
        top_k=GEOMETRY.top_k,
        block_size=GEOMETRY.block_size,
        hash_algo=GEOMETRY.hash_algo,
    )
    return message(wire.encode(said))


def handshake() -> bytes:
    """ZMTP 3.0 greeting of the NULL mechanism and the READY command of a DEALER (https://rfc.zeromq.org/spec/23/)."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    mechanism = b"NULL".ljust(20, b"\0")
    ready = (
        b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + struct.pack(">I", 0)
    )
    return signature + b"\x03\x00" + mechanism + bytes(32) + b"\x04" + bytes([len(ready)]) + ready


def message(frames: Sequence[bytes]) -> bytes:
    """A ZMTP multipart message: flag 1 says that more frames follow, flag 2 that the size has 8 bytes."""
    parts = []
    for i, frame in enumerate(frames):
        more = int(i < len(frames) - 1)
        long = len(frame) > 255
        parts.append(struct.pack(">BQ", more | 2, len(frame)) if long else struct.pack(">BB", more, len(frame)))
        parts.append(frame)
    return b"".join(parts)
