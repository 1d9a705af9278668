"""Traces are reproducible and have the shape their workload says."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.vocabulary import vocabulary
from loadgen.workloads import Workload, poisson, requests


def test_same_seed_same_trace():
    assert poisson(Workload(), 10, 20, 3) == poisson(Workload(), 10, 20, 3)
    assert poisson(Workload(), 10, 20, 3) != poisson(Workload(), 10, 20, 4)


def test_arrivals_are_poisson():
    times = np.array([r.at for r in poisson(Workload(), 50, 40, 1)])
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert (np.diff(times) >= 0).all()
    assert times[-1] < 40
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_lengths_and_domains():
    w = Workload(weights=(3.0, 1.0, 1.0, 1.0))
    reqs = requests(w, 1000, 2)
    lengths = [len(r.prompt.split()) for r in reqs]
    assert min(lengths) >= 50
    assert max(lengths) <= 400
    assert np.median(lengths) == pytest.approx(180, rel=0.1)
    assert all(40 <= r.output_tokens <= 240 for r in reqs)
    assert np.mean([r.domain == 0 for r in reqs]) == pytest.approx(0.5, abs=0.06)


def test_a_prompts_words_are_of_its_domain():
    w = Workload(two_domains=0.0)
    words = vocabulary(w.vocab, len(w.weights), w.topics, w.vocab_common)
    for r in requests(w, 50, 0):
        groups = words.groups_of(np.array(words.encode(r.prompt), np.int32))
        domain = (groups[groups > 0] - 1) // w.topics
        assert np.bincount(domain).argmax() == r.domain
        assert np.mean(domain == r.domain) > 0.8
