"""Gauges of the decode policy and the signature cache, read from their state when scraped. Nothing here is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from eldrd.handoff.snapshot import Snapshot
    from eldrd.signatures.cache import SignatureCache
    from eldrd.telemetry.metrics import Sample

    Live = Callable[[str, str, tuple[str, ...], Callable[[], Iterable[Sample]]], None]


def of_policy(live: Live, current: Callable[[], Snapshot]) -> None:
    """What the policy in use believes of its workers. live: Metrics.live; current: the Snapshot in use."""

    def figures(names: tuple[str, ...]) -> Iterable[Sample]:
        snapshot = current()
        for figure in snapshot.decode_policy.figures():
            if figure.name in names:
                worker = snapshot.decode.workers[figure.worker].name
                yield (worker, figure.name) if len(names) > 1 else (worker,), figure.value

    terms = ("base_ms", "expert_ms", "request_ms")
    live(
        "eldrd_expected_active_experts",
        "Distinct experts of a decode step (of the most loaded EP rank) as the policy expects them, mean a layer.",
        ("worker",),
        lambda: figures(("active_experts",)),
    )
    live(
        "eldrd_step_time_coefficient",
        "Milliseconds of a decode step, by term, as given or learned.",
        ("worker", "term"),
        lambda: figures(terms),
    )


def of_cache(live: Live, cache: SignatureCache) -> None:
    """How full the signature cache is and how it fares. live: Metrics.live."""

    def one(name: str) -> None:
        text = f"Signature cache: {name} (rows)."
        live(f"eldrd_signature_cache_{name}", text, (), lambda: [((), float(getattr(cache, name)))])

    for name in ("capacity", "hits", "misses", "evictions"):
        one(name)
    live("eldrd_signature_cache_rows", "Signature cache: rows held.", (), lambda: [((), float(len(cache)))])
    text = "Signature cache: sums of prompts' beginnings held."
    live("eldrd_signature_cache_checkpoints", text, (), lambda: [((), float(cache.checkpoints))])
