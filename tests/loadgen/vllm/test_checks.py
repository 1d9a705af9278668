"""An answer is right if it is the expected one, or parts from it at a near tie."""

from __future__ import annotations

import pytest

from loadgen.vllm.checks import Expected, purity


@pytest.mark.parametrize(
    ("ids", "right"),
    [
        ([1, 2, 3], True),
        ([1, 9, 3], True),
        ([1, 9, 8], True),
        ([1, 2, 8], False),
        ([9, 2, 3], False),
        ([9, 9, 3], False),
        ([1, 2], False),
        ([1, 2, 3, 4], False),
        ([], False),
    ],
)
def test_what_an_expected_answer_allows(ids: list[int], right: bool) -> None:
    assert Expected([1, 2, 3], [0.5, 1e-5, 0.2]).allows(ids) is right


def test_purity_is_the_share_at_each_domains_own_worker() -> None:
    assert purity([0, 0, 1, 1], ["a", "a", "a", "b"]) == 0.75
