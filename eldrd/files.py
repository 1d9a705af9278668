"""The files and folders that settings name: read, or tried, before anything uses them. For `eldrd check`, start and reload."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from eldrd.config import ConfigError
from eldrd.partitions import source
from eldrd.partitions.file import PartitionError
from eldrd.routing.ranks import load_ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from eldrd.config import Settings
    from eldrd.partitions.file import Partition
    from eldrd.signatures.geometry import Geometry


def partition(path: Path, settings: Settings, geometry: Geometry | None, current: Partition | None) -> Partition | None:
    """What partitions.source.load gives; path: the configuration's. Raises ConfigError."""
    try:
        return source.load(settings, geometry, current)
    except PartitionError as e:
        raise ConfigError("\n".join(f"{path}: partitions.file: {line}" for line in str(e).splitlines())) from None


def ranks(path: Path, settings: Settings) -> NDArray[np.int32] | int:
    """The rank map, or the number of ranks where none is named. Raises ConfigError."""
    try:
        return load_ranks(Path(settings.union.rank_map)) if settings.union.rank_map else settings.union.ep_ranks
    except ValueError as e:
        raise ConfigError(f"{path}: union.rank_map: {e}") from None


def writable(path: Path, settings: Settings) -> None:
    """Raises ConfigError for the places that eldrd is to write to and may not, such as those a service's sandbox closes:
    a capture or a refit would tell of it only when it is made."""
    wanted = []
    if settings.capture.dir:
        wanted.append(("capture.dir", settings.capture.dir, _nearest(Path(settings.capture.dir))))
    if settings.refit.enabled and (state := source.state_path(settings)) is not None:
        wanted.append(("refit.state", str(state), state.parent))
    problems = [
        f"{path}: {key}: {name}: this user cannot write there"
        for key, name, folder in wanted
        if not (os.access(folder, os.W_OK | os.X_OK) and folder.is_dir())
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _nearest(folder: Path) -> Path:
    """The folder, or the one above it that can be seen. Path.exists() would raise where a folder must not be searched."""
    return next(p for p in (folder, *folder.parents) if os.access(p, os.F_OK) or p == p.parent)
