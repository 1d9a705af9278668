"""Which computed token counts for which (request, KV block), and the counts themselves. NumPy only: no vLLM, no I/O.

Counts belong to (request, position), never to a physical block: vLLM frees, shares and recomputes physical blocks,
while the block hash names a position's whole history. A block is complete when all its tokens were counted in order;
anything else (a gap, a lost capture) makes that block bad and the request partial, never wrong. Generated tokens are
summed by request (``generated.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from eldrd_hook import wire
from eldrd_hook.generated import Generated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_GROUP_IDS = 1 << 15

SENTINEL = -1
"""What a capture buffer holds where no layer wrote."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A request's first counted tokens are about to be computed. key: its ``eldr_id``, or None: blocks only; tokens: prompt
    length."""

    request: str
    key: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, stop) of one request, computed in one step; all of its prompt or all generated.

    blocks: the physical KV blocks that hold them, the first one holding ``start``; skip: tokens of the request that the
    step computes before ``start``.
    """

    request: str
    start: int
    stop: int
    blocks: tuple[int, ...]
    skip: int = 0


@dataclass(slots=True)
class Step:
    """What the scheduler tells the worker about one engine step.

    hashes: by request the index of the first new block and the 64-bit hashes from there on; closed: by request that
    ended the number of tokens it generated; requests, tokens: all that a step computes which decodes and is to be counted
    as one, else 0.
    """

    opened: list[Opened] = field(default_factory=list)
    hashes: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    closed: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.opened or self.hashes or self.chunks or self.closed or self.tokens)


@dataclass(frozen=True, slots=True)
class Record:
    """A prompt whose last token has been computed. hashes: uint64 [full blocks]; counts: [L * E] of the tail."""

    key: str
    tokens: int
    hashes: NDArray[np.uint64]
    tail: int
    counts: NDArray[np.generic]
    partial: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request that ended. tokens: generated tokens counted; counts: uint16 or uint32 [L * E] of them."""

    key: str
    tokens: int
    counts: NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Counted:
    """What one step completed. hashes: uint64 [n]; counts: uint8 or uint16 [n, L * E]."""

    hashes: NDArray[np.uint64]
    counts: NDArray[np.generic]
    records: list[Record]
    decoded: list[Decoded] = field(default_factory=list)


def low64(block_hash: bytes) -> int:
    """The integer vLLM's KV events carry for a block hash (vllm/v1/core/kv_cache_utils.py maybe_convert_block_hash)."""
    return int.from_bytes(block_hash[-8:], "big")


def rows_by_order(
    chunks: Sequence[Chunk], requests: Sequence[str], scheduled: Mapping[str, int]
) -> list[NDArray[np.int64] | None]:
    """Rows of each chunk's tokens where the batch's order is known: one request's tokens after the other's."""
    first: dict[str, int] = {}
    row = 0
    for request in requests:
        first[request] = row
        row += scheduled[request]
    found: list[NDArray[np.int64] | None] = []
    for c in chunks:
        at = first.get(c.request)
        n = c.stop - c.start
        if at is None or c.skip + n > scheduled[c.request]:
            found.append(None)
        else:
            found.append(np.arange(at + c.skip, at + c.skip + n, dtype=np.int64))
    return found


def rows_by_slot(chunks: Sequence[Chunk], slots: NDArray[np.int64], block_size: int) -> list[NDArray[np.int64] | None]:
    """Rows of each chunk's tokens from the step's slots (a row's physical block * block_size + offset; -1: padding).

    None for a chunk with a token whose slot the step did not write.
    """
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    wanted = [_slots(c, block_size) for c in chunks]
    # All chunks at once: a decode step has hundreds of one token.
    flat = np.concatenate([w for w in wanted if w is not None]) if any(w is not None for w in wanted) else slots[:0]
    at = np.minimum(np.searchsorted(ordered, flat), max(0, len(ordered) - 1))
    hit = ordered[at] == flat if len(ordered) else np.zeros(len(flat), np.bool_)
    rows = order[at] if len(ordered) else at
    found: list[NDArray[np.int64] | None] = []
    begin = 0
    for w in wanted:
        end = begin + (0 if w is None else len(w))
        found.append(rows[begin:end] if w is not None and hit[begin:end].all() else None)
        begin = end
    return found


def _slots(chunk: Chunk, block_size: int) -> NDArray[np.int64] | None:
    """The slots of a chunk's tokens, None if it names too few blocks."""
    if len(chunk.blocks) <= (chunk.stop - 1) // block_size - chunk.start // block_size:
        return None
    if chunk.stop == chunk.start + 1:
        return np.array([chunk.blocks[0] * block_size + chunk.start % block_size], np.int64)
    position = np.arange(chunk.start, chunk.stop, dtype=np.int64)
    blocks = np.asarray(chunk.blocks, np.int64)
    return blocks[position // block_size - chunk.start // block_size] * block_size + position % block_size


@dataclass(slots=True)
class _Prompt:
    key: str | None
    tokens: int
    hashes: list[int] = field(default_factory=list)
    block: int = -1
    """The block that is begun but not complete; -1: none."""
    counted: int = 0
    counts: NDArray[np.unsignedinteger] | None = None
    bad: set[int] = field(default_factory=set)
    recorded: bool = False
    unnamed: dict[int, NDArray[np.unsignedinteger]] = field(default_factory=dict)
    """Complete blocks with generated tokens whose hash has not come yet: it follows the last token's sampling."""
    generated: Generated | None = None

    def take(
        self, block: int, offset: int, n: int, counts: NDArray[np.unsignedinteger] | None
    ) -> NDArray[np.unsignedinteger] | None:
        """Adds n tokens that begin at ``offset`` within ``block``; the block's counts so far, None if it is bad."""
        if offset and counts is not None:
            continues = self.block == block and self.counted == offset and self.counts is not None
            counts = counts + self.counts if continues and self.counts is not None else None
        if counts is None:
            self.bad.add(block)
            self.block, self.counts = -1, None
        else:
            self.bad.discard(block)
            self.block, self.counted, self.counts = block, offset + n, counts
        return counts


class Attributor:
    """Turns steps and their captured expert ids into counts of complete blocks, records of finished prompts and counts of
    what requests generated.

    layers, experts: L and E of the rows; block_size: tokens of a hash block; blocks: whether blocks are counted and
    prompts recorded; decode: whether generated tokens are summed by request.
    """

    def __init__(
        self, layers: int, experts: int, block_size: int, *, blocks: bool = True, decode: bool = False
    ) -> None:
        self.layers, self.experts, self.block_size = layers, experts, block_size
        self.width = layers * experts
        self.dtype: np.dtype[np.unsignedinteger] = wire.DTYPES[wire.dtype_for(block_size)]
        self._blocks, self._decode = blocks, decode
        self._prompts: dict[str, _Prompt] = {}

    def count(
        self, step: Step, rows: Sequence[NDArray[np.int64] | None], ids: NDArray[np.signedinteger] | None
    ) -> Counted:
        """Counts one step.

        rows: for each chunk the rows of ``ids`` with its tokens in order, None where they are unknown;
        ids: expert ids [rows, L, k], SENTINEL where no layer wrote; None: the step's capture was lost.
        """
        for o in step.opened:
            generated = Generated(o.tokens, self.layers, self.experts) if self._decode and o.key is not None else None
            self._prompts[o.request] = _Prompt(o.key, o.tokens, generated=generated)
        done: list[tuple[int, NDArray[np.unsignedinteger]]] = []
        for request, (first, hashes) in step.hashes.items():
            prompt = self._prompts.get(request)
            if prompt is not None and first == len(prompt.hashes):
                prompt.hashes.extend(hashes)
                named = [b for b in prompt.unnamed if b < len(prompt.hashes)]
                done += [(prompt.hashes[b], prompt.unnamed.pop(b)) for b in named]
            else:  # an earlier step never came: which hash is which block's cannot be known any more
                self._prompts.pop(request, None)
        records: list[Record] = []
        for chunk, at in zip(step.chunks, rows, strict=True):
            prompt = self._prompts.get(chunk.request)
            if prompt is None:
                continue
            if self._blocks:
                counts, whole = self._chunk(chunk, at, ids)
                self._take(prompt, chunk, counts, whole, done, records)
            if prompt.generated is not None and chunk.start >= prompt.tokens:
                usable = ids is not None and at is not None and int(at.max()) < len(ids)
                prompt.generated.take(chunk.start, ids[at] if usable and ids is not None else None, chunk.stop)
        decoded = [d for request, tokens in step.closed.items() if (d := self._close(request, tokens)) is not None]
        hashes_done = np.array([h for h, _ in done], wire.HASH)
        counts_done = np.array([c for _, c in done], self.dtype).reshape(len(done), self.width)
        return Counted(hashes_done, counts_done, records, decoded)

    def _close(self, request: str, tokens: int) -> Decoded | None:
        prompt = self._prompts.pop(request, None)
        if prompt is None or prompt.generated is None or prompt.key is None:
            return None
        counts = prompt.generated.close(tokens - 1)
        if counts is None:
            return None
        return Decoded(prompt.key, tokens - 1, counts.astype(wire.DTYPES[wire.dtype_of_decoded(tokens - 1)]))

    def _spans(self, chunk: Chunk) -> list[tuple[int, int, int]]:
        """(block, first, end) positions of each block the chunk touches."""
        size = self.block_size
        return [
            (b, max(chunk.start, b * size), min(chunk.stop, (b + 1) * size))
            for b in range(chunk.start // size, (chunk.stop - 1) // size + 1)
        ]

    def _chunk(
        self, chunk: Chunk, at: NDArray[np.int64] | None, ids: NDArray[np.signedinteger] | None
    ) -> tuple[NDArray[np.unsignedinteger], NDArray[np.bool_]]:
        """Counts [blocks touched, L * E] and whether each block's tokens were all captured."""
        size, begin = self.block_size, chunk.start // self.block_size * self.block_size
        n = -(-(chunk.stop - begin) // size)
        counts = np.zeros((n, self.width), self.dtype)
        whole = np.zeros(n, np.bool_)
        if ids is None or at is None or at.max() >= len(ids):
            return counts, whole
        lanes = (np.arange(self.layers, dtype=np.int64) * self.experts)[None, :, None]
        # A few blocks at a time: the working set then stays in the processor's cache, which makes this ten times faster.
        group = max(1, _GROUP_IDS // (size * self.layers * ids.shape[2]))
        for low in range(0, n, group):
            high = min(n, low + group)
            first, end = max(chunk.start, begin + low * size), min(chunk.stop, begin + high * size)
            chosen = ids[at[first - chunk.start : end - chunk.start]]
            cell = np.arange(first - begin, end - begin, dtype=np.int64) // size - low
            whole[low:high] = True
            flat = chosen.reshape(len(chosen), -1)
            seen = (flat.min(axis=1) >= 0) & (flat.max(axis=1) < self.experts)
            if not seen.all():
                whole[low + cell[~seen]] = False
                chosen, cell = chosen[seen], cell[seen]
            key = chosen + lanes
            key += (cell * self.width)[:, None, None]
            counts[low:high] = np.bincount(key.ravel(), minlength=(high - low) * self.width).reshape(-1, self.width)
        return counts, whole

    def _take(
        self,
        prompt: _Prompt,
        chunk: Chunk,
        counts: NDArray[np.unsignedinteger],
        whole: NDArray[np.bool_],
        done: list[tuple[int, NDArray[np.unsignedinteger]]],
        records: list[Record],
    ) -> None:
        for i, (block, first, end) in enumerate(self._spans(chunk)):
            offset = first - block * self.block_size
            total = prompt.take(block, offset, end - first, counts[i] if whole[i] else None)
            if total is None or offset + end - first < self.block_size:
                continue
            if block < len(prompt.hashes):
                done.append((prompt.hashes[block], total))
            elif (block + 1) * self.block_size > prompt.tokens:
                prompt.unnamed[block] = total
            else:
                prompt.bad.add(block)
        if chunk.stop == prompt.tokens and prompt.key is not None and not prompt.recorded:
            prompt.recorded = True
            records.append(self._record(prompt, prompt.key))

    def _record(self, prompt: _Prompt, key: str) -> Record:
        blocks, tail = divmod(prompt.tokens, self.block_size)
        begun = prompt.block == blocks and prompt.counts is not None
        return Record(
            key=key,
            tokens=prompt.tokens,
            hashes=np.array(prompt.hashes[:blocks], wire.HASH),
            tail=tail,
            counts=(prompt.counts if begun and prompt.counts is not None else np.zeros(self.width)).astype(self.dtype),
            partial=bool(prompt.bad) or len(prompt.hashes) < blocks,
        )
