"""KV hand-offs between emulated workers: pinned by P, claimed once by D, released unread, expired by lease. Holds no HTTP
and no timing of transfers.

Real vLLM answers a hand-off that is used twice or after its lease with wrong tokens. Here each misuse is recorded as a
Violation and the load fails, so that a test can demand that there is none.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.fleet.sequence import Sequence

_ENDED_KEPT = 100_000


class HandoffError(Exception):
    """D cannot load this KV; ``kind`` as in Violation."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Violation:
    """A hand-off rule that a client of the fleet broke. kind: ``malformed``, ``unknown_engine``, ``unknown``,
    ``consumed`` (used twice), ``expired``, ``wrong_prompt`` or ``blocks_short``; worker: the decode worker."""

    kind: str
    worker: str
    remote_request_id: str


@dataclass(slots=True)
class _Pin:
    key: bytes
    blocks: list[int]
    release: Callable[[], None]
    expiry: asyncio.TimerHandle


class Ledger:
    """The hand-offs of one prefill engine. ends: how many ended as ``consumed``, ``released`` or ``expired``;
    idle_releases: releases of what had ended already or never was, which change nothing."""

    def __init__(self, host: str, port: int, lease_s: float) -> None:
        self.engine_id = str(uuid.uuid4())
        self.host, self.port, self.lease_s = host, port, lease_s
        self.ends: Counter[str] = Counter()
        self.idle_releases = 0
        self._pins: dict[str, _Pin] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    @property
    def pinned(self) -> int:
        """Hand-offs that wait for a D."""
        return len(self._pins)

    def pin(self, seq: Sequence, release: Callable[[], None]) -> dict[str, Any]:
        """Keep a finished prefill's KV; returns the kv_transfer_params as NixlConnector's
        (nixl/pull_scheduler.py request_finished). ``release`` is called once, when the hand-off ends."""
        rid = seq.request_id
        expiry = asyncio.get_running_loop().call_later(self.lease_s, self._end, rid, "expired")
        self._pins[rid] = _Pin(seq.prompt.tobytes(), list(seq.blocks), release, expiry)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(seq.blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": rid,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(seq.prompt),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": seq.cached_tokens,
        }

    def claim(self, rid: str, key: bytes, blocks: list[int]) -> None:
        """D takes the KV. Raises HandoffError if there is no such hand-off (any more) or it is of another prompt."""
        pin = self._pins.get(rid)
        if pin is None:
            raise HandoffError(self._ended.get(rid, "unknown"))
        if pin.key != key:
            raise HandoffError("wrong_prompt")
        if blocks != pin.blocks:
            raise HandoffError("blocks_short")
        self._end(rid, "consumed")

    def release(self, rid: str) -> None:
        """Free the KV unread: D refused or dropped the request before its engine saw it."""
        if rid in self._pins:
            self._end(rid, "released")
        else:
            self.idle_releases += 1

    def close(self) -> None:
        """Drop all pins without ending them: the engine is gone."""
        for pin in self._pins.values():
            pin.expiry.cancel()
        self._pins.clear()

    def _end(self, rid: str, how: str) -> None:
        pin = self._pins.pop(rid)
        pin.expiry.cancel()
        pin.release()
        self.ends[how] += 1
        self._ended[rid] = how
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)


class Fabric:
    """What connects the workers of one fleet: finds a hand-off's engine and records violations."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._ledgers: dict[str, Ledger] = {}

    def join(self, ledger: Ledger) -> None:
        self._ledgers[ledger.engine_id] = ledger

    def leave(self, ledger: Ledger) -> None:
        self._ledgers.pop(ledger.engine_id, None)

    def claim(self, worker: str, seq: Sequence) -> None:
        """Claim the hand-off that ``seq.params`` names. Raises HandoffError and records the violation."""
        params = seq.params or {}
        rid = str(params.get("remote_request_id"))
        try:
            groups = params.get("remote_block_ids")
            if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], list):
                raise HandoffError("malformed")
            ledger = self._ledgers.get(str(params.get("remote_engine_id")))
            if ledger is None:
                raise HandoffError("unknown_engine")
            ledger.claim(rid, seq.prompt.tobytes(), groups[0])
        except HandoffError as e:
            self.violations.append(Violation(e.kind, worker, rid))
            raise

    def release(self, params: dict[str, Any]) -> None:
        """D's API server tells the engine named in ``params`` that nobody will read the KV, as vLLM's
        (entrypoints/generate/base/serving.py _with_kv_transfer_rejection_cleanup) does; misuse changes nothing."""
        ledger = self._ledgers.get(str(params.get("remote_engine_id")))
        if ledger is not None:
            ledger.release(str(params.get("remote_request_id")))
