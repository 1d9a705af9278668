"""The ledger: every hand-off ends once, whatever is called in whatever order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eldrd.handoff.ledger import OUTCOMES, Ledger


def test_an_entry_is_open_until_it_ends() -> None:
    counted: list[Any] = []
    ledger = Ledger(counted.append)
    entry = ledger.open("r", "p0", {"a": 1}, 5.0)
    assert (len(ledger), list(ledger)) == (1, [entry])
    assert (entry.id, entry.prefill, entry.params, entry.opened, entry.outcome) == ("r", "p0", {"a": 1}, 5.0, None)
    assert not entry.given
    assert not entry.releasing
    entry.end("consumed")
    assert (len(ledger), entry.outcome, counted) == (0, "consumed", ["consumed"])


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(OUTCOMES)), max_size=40))
def test_the_first_outcome_counts(ends: list[tuple[int, Any]]) -> None:
    counted: list[Any] = []
    ledger = Ledger(counted.append)
    entries = [ledger.open(f"r{i}", "p0", {}, 0.0) for i in range(6)]
    first: dict[int, Any] = {}
    for i, outcome in ends:
        entries[i].end(outcome)
        first.setdefault(i, outcome)
    assert counted == list(first.values())
    assert len(ledger) == 6 - len(first)
    assert {e.id for e in ledger} == {e.id for e in entries if e.outcome is None}


def test_ending_while_looking() -> None:
    ledger = Ledger(lambda _: None)
    for i in range(5):
        ledger.open(f"r{i}", "p0", {}, 0.0)
    for entry in ledger:
        entry.end("lost")
    assert len(ledger) == 0
