"""Planned output: its pieces are the text, cut at the earliest stop, and never show what might be cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadgen.fleet.sequence import plan_output
from loadgen.vocabulary import EOS, Vocabulary

WORDS = Vocabulary(64, domains=1, topics=1)
tokens = st.lists(st.integers(1, 63), min_size=1, max_size=12)
stops = st.lists(st.text(alphabet="bdf ae", min_size=1, max_size=4), max_size=2)


def text_of(ids: list[int]) -> str:
    return "".join(f" {WORDS.words[t]}" for t in ids)


@given(tokens, stops, st.booleans())
def test_pieces_are_the_text_cut_at_the_first_stop(ids, stop, include):
    out = plan_output(ids, WORDS, max_tokens=len(ids), stop=stop, include_stop=include)
    n = next((n for n in range(1, len(ids) + 1) if any(s in text_of(ids[:n]) for s in stop)), None)
    assert len(out.pieces) == len(out.tokens)
    if n is None:
        assert (out.finish_reason, out.stop_reason) == ("length", None)
        assert "".join(out.pieces) == text_of(ids)
        return
    assert out.tokens == ids[:n]
    assert out.finish_reason == "stop"
    text = text_of(ids[:n])
    end = text.index(out.stop_reason) + (len(out.stop_reason) if include else 0)
    assert "".join(out.pieces) == text[:end]


@given(tokens, st.integers(1, 63))
def test_stop_tokens(ids, stop):
    out = plan_output(ids, WORDS, max_tokens=len(ids), stop_token_ids=[stop])
    assert out.tokens == ids[: ids.index(stop) + 1] if stop in ids else ids
    assert (out.finish_reason == "stop") == (stop in ids)


def test_end_of_sequence_is_a_stop_that_spells_nothing():
    out = plan_output([5, EOS], WORDS, max_tokens=9)
    assert (out.finish_reason, out.stop_reason, out.pieces) == ("stop", None, [f" {WORDS.words[5]}", ""])
