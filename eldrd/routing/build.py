"""Decode policies by the names the configuration uses. The one list of them; no policy is implemented here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from eldrd.routing import load, locality, prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eldrd.partitions.file import Partition
    from eldrd.routing.policy import Policy
    from eldrd.routing.prefill import PrefillPolicy

POLICIES: Final[tuple[str, ...]] = ("random", "round_robin", "jsq", "p2c", "eldr")


def build(
    name: str, *, partition: Partition | None, workers: Sequence[str], tau: float, seed: int | None = None
) -> Policy:
    """The policy of that name over decode workers in row order.

    partition and tau concern ``eldr`` alone, which falls back to jsq without a partition; seed makes ``random`` and
    ``p2c`` repeatable. Raises ValueError for an unknown name, a tau outside 0..2 or a partition of other workers.
    """
    match name:
        case "random":
            return load.Random(seed)
        case "round_robin":
            return load.RoundRobin()
        case "jsq":
            return load.ShortestQueue()
        case "p2c":
            return load.PowerOfTwo(seed)
        case "eldr":
            return locality.LocalityBand(partition, workers, tau)
    raise ValueError(f"policy is {name!r}, expected one of {', '.join(POLICIES)}")


def build_prefill(name: str, *, workers: Sequence[str]) -> PrefillPolicy:
    """The prefill policy of that name over prefill workers in row order. Raises ValueError for an unknown name."""
    match name:
        case "prefix_hash":
            return prefill.PrefixHash(workers)
        case "jsq":
            return prefill.ByLoad(load.ShortestQueue())
        case "round_robin":
            return prefill.ByLoad(load.RoundRobin())
    raise ValueError(f"prefill policy is {name!r}, expected prefix_hash, jsq or round_robin")


def warm_up() -> None:
    """Compile every policy's kernels, so that no request waits for it. Seconds when cold."""
    load.warm_up()
    locality.warm_up()
