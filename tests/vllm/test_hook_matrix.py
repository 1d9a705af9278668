"""The hook over what vLLM on CPU can run: one engine a case in a process of its own, signatures against transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

# A fourth architecture shows little that the others do not, and each engine takes half a minute on two cores.
ALL = os.environ.get("ELDRD_TEST_MATRIX") == "all"


def case(name: str) -> dict[str, Any]:
    """Runs ``python -m loadgen.vllm.hook_check name``."""
    run = subprocess.run(
        [sys.executable, "-m", "loadgen.vllm.hook_check", name],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def right(checks: list[dict[str, Any]]) -> None:
    """Every signature is exact by eldrd's own word and by the truth, near ties of the gate apart."""
    assert checks
    assert [c for c in checks if c["state"] != "exact" or not (c["exact"] or c["near_tie"])] == []
    # Near ties are rare; how rare is the processor's way to add up.
    assert sum(c["exact"] for c in checks) > len(checks) // 2


def standard(found: dict[str, Any], *, shared: int = 192) -> None:
    """shared: cached tokens of a prompt that shares 200 with one before."""
    right(found["checks"])
    by_label = {c["label"]: c for c in found["checks"]}
    assert by_label["again-333"]["cached"] == 320
    assert by_label["hit-477"]["cached"] == shared


def test_two_tensor_parallel_ranks() -> None:
    standard(case("tensor_parallel"))


def test_glm4_moe() -> None:
    """Grouped sigmoid routing with a correction bias, a shared expert, two dense layers first."""
    found = case("glm4_moe")
    standard(found)
    assert found["layers"] == [2, 3, 4]


def test_gpt_oss() -> None:
    """Sliding windows in every other layer: two KV-cache groups, hashes by the one that keeps all blocks. vLLM keeps the
    windows' blocks at a prompt's end only, so a prefix is hit where a prompt ended."""
    found = case("gpt_oss")
    standard(found, shared=0)
    assert found["layers"] == [0, 1, 2, 3]


@pytest.mark.skipif(not ALL, reason="ELDRD_TEST_MATRIX=all runs it: half a minute for one more architecture")
def test_olmoe() -> None:
    standard(case("olmoe"))


def test_lora_and_cache_salt_have_keys_of_their_own() -> None:
    """The same 150 tokens plain, with an adapter, and under two salts: four sets of rows, each right."""
    found = case("keys")
    right(found["checks"])
    assert found["lora_moves"] > 50, "the adapter must change the routing"
    cached = {c["label"]: c["cached"] for c in found["checks"]}
    assert cached["lora-150"] == 0
    assert cached["lora-again-150"] == 128
    assert cached["salt-b-150"] == 0
    assert cached["plain-again-150"] == 128
    assert found["rows"] == 4 * (150 // 32)


def test_a_plain_server_counts_both_phases() -> None:
    """Decode counts equal the truth, preemptions included; blocks that decode completed are hit by the next turn."""
    found = case("both")
    right(found["checks"])
    assert found["preempted"] > 0
    assert [c for c in found["checks"] if not c["decode_exact"]] == []
    assert [c["decoded"] for c in found["checks"]] == [89] * 4 + [2] * 4 + [299] * 8
    turns = [c for c in found["checks"] if c["label"].startswith("turn")]
    assert sum(c["cached"] for c in turns) >= 4 * 64
    # Steps, their requests, their active experts; float rounding may swap two experts in one layer of one step.
    measured, truth = found["steps"]["measured"], found["steps"]["truth"]
    assert measured[:2] == truth[:2]
    assert measured[2] == pytest.approx(truth[2], abs=0.5)
    assert truth[2] / truth[0] > 1.5 * 4, "the batch must use more experts than one request does"


def test_kv_events_keep_the_cache_and_vllms_alike() -> None:
    """504 requests through a KV cache for some dozens of blocks: no row of a block that vLLM dropped, none it has missing."""
    found = case("events")
    right(found["checks"])
    assert found["requests"] == 504
    assert found["removed"] > 500
    assert found["lost"] == 0
    assert found["held"] > 10
    assert (found["rows"], found["lacking"]) == (found["held"], 0)
    assert found["rows_after_reset"] == 0
