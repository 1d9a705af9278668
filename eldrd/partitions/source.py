"""Where the partition that the daemon routes by comes from: the configured file, or what refits made of it. No policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from eldrd.partitions import file as partition_file
from eldrd.partitions.file import PartitionError
from eldrd.partitions.refit import adapt, continues

if TYPE_CHECKING:
    from eldrd.config import Settings
    from eldrd.partitions.file import Partition
    from eldrd.signatures.geometry import Geometry

log = structlog.get_logger()


def state_path(settings: Settings) -> Path | None:
    """The file that refits are kept in; None without a partition to refit."""
    if not settings.partitions.file:
        return None
    return Path(settings.refit.state or settings.partitions.file + ".refit")


def load(settings: Settings, geometry: Geometry | None, current: Partition | None) -> Partition | None:
    """The partition for these settings, None where they name none. Reads files.

    With online refit on, ``current`` or the kept state goes on where it is a refit of the file, and workers that joined
    or left are adapted to. geometry: what the hooks count, None while no hook has said. Raises PartitionError with a
    line for everything that does not fit the fleet.
    """
    if not settings.partitions.file:
        return None
    partition = partition_file.load(Path(settings.partitions.file))
    workers = [w.name for w in settings.decode.workers]
    if settings.refit.enabled:
        partition = _latest(partition, current, state_path(settings))
        partition = adapt(partition, workers) or partition
    problems = partition_file.mismatches(partition, workers, geometry)
    if problems:
        raise PartitionError("\n".join(f"{settings.partitions.file}: {p}" for p in problems))
    return partition


def _latest(base: Partition, current: Partition | None, state: Path | None) -> Partition:
    if current is not None and continues(current, base):
        return current
    if state is None or not state.exists():
        return base
    try:
        kept = partition_file.load(state)
    except PartitionError as e:
        log.warning("refit_state_ignored", problem=str(e))
        return base
    return kept if continues(kept, base) else base
