"""What a request is served with: settings, pools and policies, swapped whole by a reload. Nothing in it is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eldrd.config import Settings
    from eldrd.fleet.table import Pool
    from eldrd.partitions.file import Partition
    from eldrd.routing.policy import Policy
    from eldrd.routing.prefill import PrefillPolicy


@dataclass(frozen=True, slots=True)
class Snapshot:
    """generation: counts the configurations of this process, from 1; client_keys: hashes of the keys that clients may
    use, empty: no key needed; worker_headers: header lines for every request to a worker."""

    generation: int
    settings: Settings
    prefill: Pool
    decode: Pool
    prefill_policy: PrefillPolicy
    decode_policy: Policy
    partition: Partition | None
    client_keys: frozenset[bytes] = frozenset()
    worker_headers: bytes = b""
