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
    """generation: counts the configurations of this process, from 1; models: names that clients may ask for, empty while
    no worker has told its own."""

    generation: int
    settings: Settings
    prefill: Pool
    decode: Pool
    prefill_policy: PrefillPolicy
    decode_policy: Policy
    partition: Partition | None
