"""The block pool against what must hold whatever is allocated and released; block hashes chain over the prefix."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.fleet.kv import BlockPool, block_hashes

CAPACITY = 12
# A prompt is a path in a small tree of blocks, so that prefixes are shared often.
prompts = st.lists(st.integers(0, 1), max_size=6)


def hashes_of(path: list[int]) -> list[int]:
    return [hash(tuple(path[: i + 1])) for i in range(len(path))]


@given(
    st.lists(
        st.one_of(st.tuples(st.just("take"), prompts, st.integers(0, 3)), st.tuples(st.just("give"), st.integers(0, 9)))
    )
)
def test_pool_keeps_its_promises(operations):
    pool = BlockPool(CAPACITY)
    held: list[tuple[list[int], list[int]]] = []
    content: dict[int, int] = {}
    for op in operations:
        if op[0] == "give":
            if held:
                pool.release(held.pop(op[1] % len(held))[1])
        else:
            hashes = hashes_of(op[1])
            cached = pool.match(hashes)
            total = len(hashes) + op[2]
            blocks = pool.allocate(hashes, cached, total)
            in_use = {b for _, bs in held for b in bs}
            if blocks is None:
                assert len(in_use) + total > CAPACITY
                continue
            assert len(set(blocks)) == total
            # Cached blocks still hold what they were written with; fresh ones are nobody's.
            assert [content[b] for b in blocks[:cached]] == hashes[:cached]
            assert not in_use & set(blocks[cached:])
            content.update(zip(blocks[cached:], hashes[cached:], strict=False))
            for b in blocks[len(hashes) :]:
                content.pop(b, None)
            assert pool.match(hashes) == len(hashes)
            held.append((hashes, blocks))
        in_use = {b for _, bs in held for b in bs}
        assert pool.usage == len(in_use) / CAPACITY
        assert all(pool.match(hashes) == len(hashes) for hashes, _ in held)
    assert pool.reset() == (not {b for _, bs in held for b in bs})


def test_least_recently_used_blocks_go_first():
    pool = BlockPool(4)
    for path in ([0, 0], [1, 1]):
        pool.release(pool.allocate(hashes_of(path), 0, 2))
    pool.release(pool.allocate(hashes_of([0, 0]), 2, 2))
    pool.release(pool.allocate((), 0, 1))
    # The tail of the older prompt went, its head stays.
    assert pool.match(hashes_of([0, 0])) == 2
    assert pool.match(hashes_of([1, 1])) == 1


@given(st.lists(st.integers(0, 9), max_size=20), st.lists(st.integers(0, 9), max_size=20))
def test_hashes_are_equal_exactly_as_far_as_the_prefix(a, b):
    left, right = (block_hashes(np.array(x, np.int32), 4) for x in (a, b))
    assert (len(left), len(right)) == (len(a) // 4, len(b) // 4)
    for i, (x, y) in enumerate(zip(left, right, strict=False)):
        assert (x == y) == (a[: 4 * i + 4] == b[: 4 * i + 4])


def test_salt_separates_prompts():
    prompt = np.arange(64, dtype=np.int32)
    assert not set(block_hashes(prompt, 32)) & set(block_hashes(prompt, 32, "tenant"))
