"""Which faults a chaos run draws for a worker, and how often. Draws only; the workers act on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loadgen.fleet import Faults

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Callable

# Texts that stand in for a first token: a false end of stream, characters of several bytes, one large event.
TEXTS: Final = ("data: [DONE]\n\n", "汉字かな한국어🀄", "x" * 2**20)

_Make = "Callable[[random.Random], dict[str, Any]]"

# One request in 1 / sum(weights) meets a fault.
_BOTH: Final[list[tuple[str, float, Any]]] = [
    ("slow", 0.02, lambda r: {"delay_s": r.uniform(0, 0.05)}),
    ("refuse", 0.008, lambda r: {"refuse": True, "cut": _cut(r)}),
    ("drop_reused", 0.02, lambda r: {"drop_reused": True, "cut": _cut(r)}),
    ("error_4xx", 0.008, lambda r: {"status": r.choice((400, 422))}),
    ("error_5xx", 0.006, lambda r: {"status": r.choice((500, 503))}),
    ("split", 0.02, lambda r: {"split": r.choice((7, 23, 64, 300))}),
    ("cut", 0.01, lambda r: {"cut_at": int(r.expovariate(1 / 400)), "cut": _cut(r)}),
    ("stall", 0.002, lambda r: {"stall_at": int(r.expovariate(1 / 400))}),
]
_PREFILL: Final[list[tuple[str, float, Any]]] = [
    *_BOTH,
    ("drop_params", 0.005, lambda _: {"drop_params": True}),
    ("wrong_params", 0.005, lambda _: {"wrong_params": True}),
    ("finish_first", 0.01, lambda _: {"finish_first": True}),
]
_DECODE: Final[list[tuple[str, float, Any]]] = [
    *_BOTH,
    ("die", 0.02, lambda r: {"die_after_chunks": r.randint(1, 12), "die_inside": r.random() < 0.5, "cut": _cut(r)}),
    ("chunks", 0.02, lambda r: {"chunk": r.choice((5, 17, 100, 1000)), "split": r.choice((0, 0, 30))}),
    ("paced", 0.01, lambda r: {"pause_s": r.uniform(0, 0.02)}),
    ("gzip", 0.01, lambda _: {"gzip": True}),
    ("text", 0.01, lambda r: {"first_text": r.choice(TEXTS)}),
]


def _cut(r: random.Random) -> str:
    return r.choice(("reset", "close"))


def on_prefill(rng: random.Random, counted: Counter[str]) -> Callable[[], Faults]:
    """What each request to a prefill worker meets; faults drawn are counted by name."""
    return _drawing(_PREFILL, rng, counted, "prefill")


def on_decode(rng: random.Random, counted: Counter[str]) -> Callable[[], Faults]:
    return _drawing(_DECODE, rng, counted, "decode")


def _drawing(
    table: list[tuple[str, float, Any]], rng: random.Random, counted: Counter[str], role: str
) -> Callable[[], Faults]:
    def draw() -> Faults:
        at = rng.random()
        for name, weight, make in table:
            if at < weight:
                counted[f"{role}_{name}"] += 1
                return Faults(**make(rng))
            at -= weight
        return Faults()

    return draw
