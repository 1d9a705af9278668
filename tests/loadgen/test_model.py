"""The emulated model has the statistics it claims, and is the same in every process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.fleet.model import EmulatedMoE, ModelSpec, load
from loadgen.workloads import Workload, requests

REQUESTS, OUTPUT = 300, 120


@pytest.fixture(scope="module")
def model() -> EmulatedMoE:
    return load(ModelSpec())


@pytest.fixture(scope="module")
def traffic(model: EmulatedMoE) -> tuple[list[int], list[np.ndarray], list[np.ndarray]]:
    reqs = requests(Workload(), REQUESTS, seed=5)
    prompts = [np.array(model.vocabulary.encode(r.prompt), np.int32) for r in reqs]
    outputs = [np.array(model.continue_prompt(p, OUTPUT, 0, True, 0), np.int32) for p in prompts]
    return [r.domain for r in reqs], prompts, outputs


@pytest.mark.parametrize("batch", [8, 16, 24])
def test_one_domain_activates_17_to_25_percent_fewer_experts(model, traffic, batch):
    domains, _, outputs = traffic
    rng = np.random.default_rng(0)

    def active(rows: np.ndarray) -> float:
        return model.active(np.array([outputs[i][rng.integers(OUTPUT)] for i in rows], np.int32))

    mixed = np.mean([active(rng.choice(REQUESTS, batch, replace=False)) for _ in range(400)])
    of = [np.flatnonzero(np.array(domains) == d) for d in range(model.spec.domains)]
    same = np.mean([active(rng.choice(of[i % len(of)], batch, replace=False)) for i in range(400)])
    assert 0.17 <= 1 - same / mixed <= 0.25


def test_prefill_predicts_decode(model, traffic):
    _, prompts, outputs = traffic
    prefill = np.array([model.counts(p) / len(p) for p in prompts])
    decode = np.array([model.counts(o) / len(o) for o in outputs])
    p, d = prefill - prefill.mean(0), decode - decode.mean(0)
    correlation = (p * d).mean(0) / (p.std(0) * d.std(0) + 1e-12)
    assert 0.7 <= np.median(correlation) <= 0.9


def test_every_token_selects_top_k_different_experts_in_each_layer(model):
    spec = model.spec
    cells = model.cells.reshape(spec.vocab, spec.layers, spec.top_k)
    assert (cells // spec.experts == np.arange(spec.layers)[:, None]).all()
    assert (np.diff(np.sort(cells, axis=-1), axis=-1) > 0).all()


@given(st.lists(st.integers(0, 8191), min_size=1, max_size=100))
def test_counts_agree_with_counting_by_hand(tokens):
    model = load(ModelSpec())
    spec = model.spec
    ids = np.array(tokens, np.int32)
    by_hand = np.zeros(spec.width, int)
    for t in tokens:
        for cell in model.cells[t]:
            by_hand[cell] += 1
    assert (model.counts(ids) == by_hand).all()
    assert model.active(ids) == np.count_nonzero(by_hand) / spec.layers
    full = len(ids) // spec.block_size * spec.block_size
    assert (model.block_counts(ids[:full]).sum(0) + model.counts(ids[full:]) == by_hand).all()


def test_continuations_are_deterministic_and_nested(model):
    prompt = np.arange(3000, 3050, dtype=np.int32)
    long = model.continue_prompt(prompt, 200, 0, True, 7)
    assert model.continue_prompt(prompt, 1, 0, True, 7) == long[:1]
    assert EmulatedMoE(ModelSpec()).continue_prompt(prompt, 200, 0, True, 7) == long
    assert model.continue_prompt(prompt, 200, 0, True, 8) != long


def test_eos_ends_a_continuation_after_min_tokens(model):
    prompt = np.arange(100, 150, dtype=np.int32)
    natural = model.continue_prompt(prompt, 5000, 0, False, 0)
    assert natural[-1] == 0
    assert 0 not in natural[:-1]
    later = model.continue_prompt(prompt, 5000, 1500, False, 0)
    assert len(later) == 1501
    assert 0 not in model.continue_prompt(prompt, 5000, 0, True, 0)


@given(st.lists(st.integers(1, 8191), min_size=1))
def test_words_round_trip(tokens):
    words = load(ModelSpec()).vocabulary
    assert words.encode(words.decode(tokens)) == tokens


def test_unknown_words_are_stable_tokens(model):
    a = model.vocabulary.encode("Hello, world! Hello,")
    assert a[0] == a[2]
    assert all(0 < t < model.spec.vocab for t in a)
