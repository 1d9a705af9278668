"""Captures: signatures of live requests on disk, for `eldrd fit`. Counts, lengths and labels only, never prompts."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from eldrd.signatures.geometry import Geometry  # noqa: TC001, msgspec resolves it at run time

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX: Final = "index.json"
FORMAT: Final = "eldrd-capture"
VERSION: Final = 1


class CaptureError(ValueError):
    """A capture that cannot be read or continued; the message names the file and what is wrong with it."""


class _ShardEntry(msgspec.Struct, frozen=True):
    file: str
    requests: int


class _Index(msgspec.Struct, frozen=True):
    format: str
    version: int
    created: str
    geometry: Geometry
    shards: list[_ShardEntry]


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """N captured requests in the order they were added.

    prefill: int32 [N, L, E], the prompt's expert counts; prompt_tokens, output_tokens: int32 [N]; labels: what the
    client called the request's domain, where it did; decode: int32 [N, L, E], the counts of the generated tokens, or
    None unless every request has them.
    """

    geometry: Geometry
    prefill: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    labels: list[str | None]
    decode: NDArray[np.int32] | None = None


@dataclass(slots=True, eq=False)
class Shard:
    """Requests on their way to one file; made by CaptureWriter only."""

    prefill: NDArray[np.uint32]
    decode: NDArray[np.uint32] | None
    prompt_tokens: list[int]
    output_tokens: list[int]
    labels: list[str | None]
    widest: int = 0

    @property
    def requests(self) -> int:
        return len(self.labels)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.widest <= np.iinfo(np.uint16).max else np.uint32)

    @property
    def bytes(self) -> int:
        """Bytes of the arrays in the file."""
        cells = int(self.prefill[0].size) * (1 if self.decode is None else 2)
        return self.requests * (cells * self.dtype.itemsize + 8)


class CaptureWriter:
    """Collects requests and writes them to ``directory`` in shards, up to ``max_bytes`` of arrays.

    Continues a capture of the same geometry. ``add``, ``take_full_shard`` and ``take_shard`` belong to one thread (the
    event loop's) and do no I/O; ``write`` does the I/O and may run in any thread, one shard at a time:

        if writer.add(...) and (shard := writer.take_full_shard()):
            loop.run_in_executor(None, writer.write, shard)

    Files are written aside and renamed, the index last, so a crash loses at most the shards not yet written.
    Raises CaptureError for a directory that holds another geometry's capture or is no capture.
    """

    def __init__(self, directory: Path, geometry: Geometry, max_bytes: int, shard_requests: int = 64) -> None:
        self._directory = directory
        self._geometry = geometry
        self._max_bytes = max_bytes
        self._shard_requests = shard_requests
        self._shard: Shard | None = None
        self._full: deque[Shard] = deque()
        self._write_lock = threading.Lock()
        index = directory / INDEX
        if index.exists():
            self._index = _read_index(index)
            difference = _difference(self._index.geometry, geometry)
            if difference:
                raise CaptureError(f"{directory} captures another model: {difference}; use another directory")
        else:
            directory.mkdir(parents=True, exist_ok=True)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            self._index = _Index(FORMAT, VERSION, created, geometry, [])
        # Bytes of everything accepted, but for the shard being filled.
        self._accepted = sum((directory / s.file).stat().st_size for s in self._index.shards)
        self._requests = sum(s.requests for s in self._index.shards)

    @property
    def requests(self) -> int:
        """Requests accepted, those found in the directory included."""
        return self._requests

    def add(
        self,
        counts: NDArray[np.int32],
        prompt_tokens: int,
        output_tokens: int,
        label: str | None = None,
        decode: NDArray[np.int32] | None = None,
    ) -> bool:
        """Copy one request's counts int32 [L * E] or [L, E]; False once it would not fit in max_bytes any more.

        Whoever gives decode counts (same shape) gives them with every request. Microseconds: no I/O.
        """
        shard = self._shard
        if shard is None:
            shape = (self._shard_requests, *self._geometry.shape)
            new_decode = None if decode is None else np.empty(shape, np.uint32)
            shard = self._shard = Shard(np.empty(shape, np.uint32), new_decode, [], [], [])
        if (decode is None) != (shard.decode is None):
            raise ValueError("decode counts are given with every request or with none")
        widest, row = shard.widest, shard.requests
        shard.prefill[row] = counts.reshape(self._geometry.shape)
        shard.widest = max(shard.widest, int(shard.prefill[row].max()))
        if shard.decode is not None and decode is not None:
            shard.decode[row] = decode.reshape(self._geometry.shape)
            shard.widest = max(shard.widest, int(shard.decode[row].max()))
        shard.prompt_tokens.append(prompt_tokens)
        shard.output_tokens.append(output_tokens)
        shard.labels.append(label)
        if self._accepted + shard.bytes > self._max_bytes:
            for column in (shard.prompt_tokens, shard.output_tokens, shard.labels):
                column.pop()
            shard.widest = widest
            return False
        self._requests += 1
        if shard.requests == self._shard_requests:
            self._close()
        return True

    def take_full_shard(self) -> Shard | None:
        """The oldest full shard not yet taken, for ``write``; None while there is none."""
        return self._full.popleft() if self._full else None

    def take_shard(self) -> Shard | None:
        """Like ``take_full_shard``, but ends with the shard being filled (a timer's or the shutdown's flush)."""
        if not self._full and self._shard is not None and self._shard.requests:
            self._close()
        return self.take_full_shard()

    def write(self, shard: Shard) -> None:
        """Write a taken shard and then the index. May run off the event loop. Raises OSError as the disk does."""
        arrays: dict[str, NDArray[Any]] = {
            "prefill": shard.prefill[: shard.requests].astype(shard.dtype),
            "prompt_tokens": np.array(shard.prompt_tokens, np.int32),
            "output_tokens": np.array(shard.output_tokens, np.int32),
        }
        if shard.decode is not None:
            arrays["decode"] = shard.decode[: shard.requests].astype(shard.dtype)
        content = save(arrays, {"labels": msgspec.json.encode(shard.labels).decode()})
        with self._write_lock:
            name = f"shard-{len(self._index.shards):05d}.safetensors"
            write_atomic(self._directory / name, content)
            index = msgspec.structs.replace(
                self._index, shards=[*self._index.shards, _ShardEntry(name, shard.requests)]
            )
            write_atomic(self._directory / INDEX, msgspec.json.format(msgspec.json.encode(index)))
            self._index = index

    def flush(self) -> None:
        """Write everything taken by nobody yet: the blocking end of a capture."""
        while shard := self.take_shard():
            self.write(shard)

    def _close(self) -> None:
        if self._shard is not None:
            self._accepted += self._shard.bytes
            self._full.append(self._shard)
            self._shard = None


def load_capture(path: Path) -> Capture:
    """Read a capture's directory. Raises CaptureError naming the file for whatever is missing or broken."""
    index = _read_index(path / INDEX)
    if not index.shards:
        raise CaptureError(f"{path / INDEX}: the capture is empty")
    shards = [_read_shard(path / entry.file, entry.requests, index.geometry) for entry in index.shards]
    decode = [s["decode"] for s in shards if "decode" in s]
    return Capture(
        geometry=index.geometry,
        prefill=np.concatenate([s["prefill"] for s in shards]),
        prompt_tokens=np.concatenate([s["prompt_tokens"] for s in shards]),
        output_tokens=np.concatenate([s["output_tokens"] for s in shards]),
        labels=[label for s in shards for label in s["labels"]],
        decode=np.concatenate(decode) if len(decode) == len(shards) else None,
    )


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new content, also after a crash."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _read_index(path: Path) -> _Index:
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as e:
        raise CaptureError(f"{path}: {e}") from None
    if index.format != FORMAT or index.version != VERSION:
        raise CaptureError(f"{path}: {index.format} version {index.version}, expected {FORMAT} version {VERSION}")
    for shard in index.shards:
        if Path(shard.file).name != shard.file:
            raise CaptureError(f"{path}: shard {shard.file!r} is not a plain file name")
    return index


def _read_shard(path: Path, requests: int, geometry: Geometry) -> dict[str, Any]:
    counts = (requests, *geometry.shape)
    expected = {"prefill": counts, "prompt_tokens": (requests,), "output_tokens": (requests,)}
    shard: dict[str, Any] = {}
    try:
        # open says why a file cannot be opened; for safetensors there is none.
        with path.open("rb"), safe_open(path, "numpy") as f:
            if "decode" in f.keys():  # noqa: SIM118, safe_open is no mapping
                expected["decode"] = counts
            for key, shape in expected.items():
                array = f.get_tensor(key)
                if array.shape != shape or array.dtype.kind not in "ui":
                    raise CaptureError(f"{path}: {key} is {array.dtype} {array.shape}, expected integers {shape}")
                shard[key] = array.astype(np.int32)
            shard["labels"] = msgspec.json.decode((f.metadata() or {}).get("labels", ""), type=list[str | None])
    except (OSError, SafetensorError, msgspec.DecodeError) as e:
        raise CaptureError(f"{path}: {e}") from None
    if len(shard["labels"]) != requests:
        raise CaptureError(f"{path}: {len(shard['labels'])} labels for {requests} requests")
    return shard


def _difference(old: Geometry, new: Geometry) -> str:
    names = (n for n in old.__dataclass_fields__ if getattr(old, n) != getattr(new, n))
    return ", ".join(f"{n} is {getattr(old, n)!r} there and {getattr(new, n)!r} here" for n in names)
