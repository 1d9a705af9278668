"""Generated tokens against a per-token reference: any schedule, steps computed again, steps past the end, lost captures."""

from __future__ import annotations

import random

import numpy as np
import pytest
from eldrd_hook.attribution import SENTINEL, Attributor, Chunk, Opened, Step, rows_by_order
from eldrd_hook.generated import Generated
from hypothesis import given, settings
from hypothesis import strategies as st

LAYERS, EXPERTS, TOP_K, BLOCK = 2, 8, 2, 4


def routing(seed: int, n: int) -> np.ndarray:
    """Expert ids [n, L, k] of n tokens."""
    rng = np.random.default_rng(seed)
    return np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(n)]).astype(np.int16)


def counts(ids: np.ndarray) -> np.ndarray:
    """Counted one token after the other: [L * E]."""
    out = np.zeros((LAYERS, EXPERTS), np.int64)
    for token in ids:
        for layer, chosen in enumerate(token):
            out[layer, chosen] += 1
    return out.ravel()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    prompt=st.integers(1, 3 * BLOCK),
    generated=st.integers(1, 200),
    late=st.booleans(),
    over=st.integers(0, 1),
    blocks=st.booleans(),
)
def test_a_whole_request_with_its_blocks(
    seed: int, prompt: int, generated: int, late: bool, over: int, blocks: bool
) -> None:
    """Chunked prefill, decode, preemptions (all tokens so far are computed again), hashes that come late, a step too many."""
    rng = random.Random(seed)
    total = prompt + generated
    ids = routing(seed, total)
    a = Attributor(LAYERS, EXPERTS, BLOCK, blocks=blocks, decode=True)
    done, sampled, sent, opened = 0, 0, 0, False
    rows: dict[int, np.ndarray] = {}
    records = []
    # A request ends when its last token has been sampled, which needs all but that one computed.
    end = total - 1 + over
    while done < end:
        if done > prompt and rng.randint(0, 40) == 0:
            done = rng.randint(0, done // BLOCK) * BLOCK
        known = prompt + sampled
        stop = min(done + rng.randint(1, 2 * BLOCK), known, end) if done < known else done + 1
        step = Step()
        parts = [(done, min(stop, prompt))] if blocks else []
        parts += [(max(done, prompt), stop)]
        for first, last in parts:
            if first >= last:
                continue
            if not opened:
                step.opened.append(Opened("r", "key", prompt))
                opened = True
            full = (max(0, known - 1) if late else known) // BLOCK
            full = max(full, prompt // BLOCK)
            if blocks and full > sent:
                step.hashes["r"] = (sent, list(range(100 + sent, 100 + full)))
                sent = full
            step.chunks.append(Chunk("r", first, last, (), first - done))
        here = ids[done:stop]
        counted = a.count(step, rows_by_order(step.chunks, ["r"], {"r": stop - done}), here)
        rows |= dict(zip(counted.hashes.tolist(), counted.counts, strict=True))
        records += counted.records
        assert counted.decoded == []
        done = stop
        sampled = max(sampled, done - prompt + 1)
    closing = Step(closed={"r": generated})
    if blocks and total // BLOCK > sent:
        closing.hashes["r"] = (sent, list(range(100 + sent, 100 + total // BLOCK)))
    counted = a.count(closing, [], None)
    rows |= dict(zip(counted.hashes.tolist(), counted.counts, strict=True))
    assert a._prompts == {}
    if not opened:  # one token, and nothing but the prompt was computed
        assert counted.decoded == []
        return
    [decoded] = counted.decoded
    assert (decoded.key, decoded.tokens) == ("key", generated - 1)
    np.testing.assert_array_equal(decoded.counts, counts(ids[prompt : total - 1]))
    if blocks:
        assert [r.partial for r in records] == [False]
        assert set(rows) == {100 + b for b in range((total - 1 + over) // BLOCK)}
        for h, row in rows.items():
            np.testing.assert_array_equal(row, counts(ids[(h - 100) * BLOCK : (h - 99) * BLOCK]))
    else:
        assert rows == {}
        assert records == []


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 99), st.lists(st.integers(1, 5), min_size=1, max_size=60), st.data())
def test_lost_steps_give_no_counts(seed: int, steps: list[int], data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, len(steps) - 1))
    how = data.draw(st.sampled_from(["gap", "unknown", "sentinel", "no expert"]))
    ids = routing(seed, sum(steps))
    g = Generated(10, LAYERS, EXPERTS)
    at = 0
    for i, n in enumerate(steps):
        here: np.ndarray | None = ids[at : at + n].copy()
        if i == lost and how in ("sentinel", "no expert"):
            assert here is not None
            here[-1, 1, 0] = SENTINEL if how == "sentinel" else EXPERTS
        if i == lost and how == "unknown":
            here = None
        if not (i == lost and how == "gap"):
            g.take(10 + at, here, 10 + at + n)
        at += n
    assert g.close(at) is None


def test_a_token_computed_again_as_another_counts_once_and_as_the_last() -> None:
    ids, again = routing(1, 90), routing(2, 4)
    g = Generated(0, LAYERS, EXPERTS)
    for i in range(90):
        g.take(i, ids[i : i + 1], i + 1)
    g.take(86, again, 90)
    np.testing.assert_array_equal(g.close(90), counts(np.concatenate([ids[:86], again])))


@pytest.mark.parametrize("tokens", [-1, 11])
def test_other_lengths_than_what_was_computed_give_nothing(tokens: int) -> None:
    g = Generated(5, LAYERS, EXPERTS)
    g.take(5, routing(0, 10), 15)
    assert g.close(tokens) is None


def test_what_is_not_asked_for_is_not_kept() -> None:
    a = Attributor(LAYERS, EXPERTS, BLOCK, blocks=False, decode=True)
    step = Step([Opened("r", None, 4)], {}, [Chunk("r", 4, 5, (1,))])
    a.count(step, [np.arange(1)], routing(0, 1))
    assert a.count(Step(closed={"r": 2}), [], None).decoded == []


@pytest.mark.parametrize(("tokens", "dtype"), [(65_535, "<u2"), (65_536, "<u4")])
def test_the_counts_type_follows_the_length(tokens: int, dtype: str) -> None:
    a = Attributor(LAYERS, EXPERTS, BLOCK, blocks=False, decode=True)
    ids = np.zeros((tokens, LAYERS, TOP_K), np.int16)
    ids[:, :, 1] = 1
    step = Step([Opened("r", "key", 0)], {}, [Chunk("r", 0, tokens, (1,))], {"r": tokens + 1})
    [decoded] = a.count(step, [np.arange(tokens)], ids).decoded
    assert decoded.counts.dtype == np.dtype(dtype)
    assert decoded.counts.reshape(LAYERS, EXPERTS)[:, :2].tolist() == [[tokens, tokens]] * LAYERS
