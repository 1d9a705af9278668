"""Decode policies by the names the configuration uses. The one list of them; no policy is implemented here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from eldrd.routing import load, locality, prefill, union
from eldrd.routing.domain import Domain
from eldrd.routing.steptime import StepTime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from eldrd.partitions.file import Partition
    from eldrd.routing.policy import Policy
    from eldrd.routing.prefill import PrefillPolicy

POLICIES: Final[tuple[str, ...]] = (
    "random",
    "round_robin",
    "jsq",
    "p2c",
    "domain",
    "eldr",
    "union",
    "guarded_band",
    "soft_band",
)
# Those that read a partition; eldr falls back to jsq without one, the others do without their band.
WITH_PARTITION: Final = frozenset({"eldr", "guarded_band", "soft_band"})


@dataclass(frozen=True, slots=True)
class Options:
    """What a policy may be told beside eldr's tau; each is read by the policies its class documents.

    second_nearest: LocalityBand; labels: Domain; step, learn, weight, ranks: Union; guard, guarded_tau: GuardedBand;
    soft_guard, pull: SoftBand.
    """

    second_nearest: bool = False
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    step: StepTime = field(default_factory=StepTime)
    learn: bool = True
    weight: float = 1.0
    ranks: NDArray[np.int32] | int = 1
    guard: float = 0.1
    guarded_tau: float = 0.2
    soft_guard: float = 0.4
    pull: float = 4.0


def build(
    name: str,
    *,
    partition: Partition | None,
    workers: Sequence[str],
    tau: float,
    seed: int | None = None,
    options: Options | None = None,
    slots: Sequence[int] | None = None,
    before: Policy | None = None,
) -> Policy:
    """The policy of that name over decode workers in row order.

    tau: eldr's; seed makes ``random`` and ``p2c`` repeatable; slots: each worker's own number, never another's, by which
    state is kept over ``before``, the policy that this one takes over from (None: rows). Raises ValueError for an
    unknown name, an option out of its bounds or a partition of other workers.
    """
    options = options or Options()
    slots = range(len(workers)) if slots is None else slots
    match name:
        case "random":
            return load.Random(seed)
        case "round_robin":
            return load.RoundRobin()
        case "jsq":
            return load.ShortestQueue()
        case "p2c":
            return load.PowerOfTwo(seed)
        case "domain":
            return Domain(workers, options.labels)
        case "eldr":
            return locality.LocalityBand(partition, workers, tau, second_nearest=options.second_nearest)
        case "union":
            return union.Union(
                slots,
                options.step,
                learn=options.learn,
                weight=options.weight,
                ranks=options.ranks,
                before=before,
            )
        case "guarded_band":
            return union.GuardedBand(
                slots,
                options.step,
                partition=partition,
                workers=workers,
                guard=options.guard,
                tau=options.guarded_tau,
                learn=options.learn,
                weight=options.weight,
                ranks=options.ranks,
                before=before,
            )
        case "soft_band":
            return union.SoftBand(
                slots,
                options.step,
                partition=partition,
                workers=workers,
                guard=options.soft_guard,
                pull=options.pull,
                learn=options.learn,
                weight=options.weight,
                ranks=options.ranks,
                before=before,
            )
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
    locality.warm_up()
    union.warm_up()
