"""What the hook refuses, and its copies to the host, with stand-ins for vLLM's configuration and for CUDA."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm


def config(**changes: Any) -> Any:
    parallel = dict.fromkeys(
        (
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        1,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(get_num_experts=lambda: 32),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        parallel_config=SimpleNamespace(**parallel, enable_dbo=False),
        speculative_config=changes.get("speculative_config"),
    )


def test_decode_counts_and_drafts_exclude_each_other() -> None:
    from eldrd_hook import capture

    drafting = config(speculative_config=object())
    capture.check(drafting)
    capture.check(config(), decode=True)
    with pytest.raises(capture.UnseenError, match="--speculative-config"):
        capture.check(drafting, decode=True)


def test_an_unknown_phase_is_named() -> None:
    from eldrd_hook.connector import _phase

    assert _phase({}) == "prefill"
    with pytest.raises(ValueError, match="prefill, decode, both"):
        _phase({"eldr_phase": "train"})


class FakeCuda:
    """Writes down what would go to which stream; copies happen at once."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.now = log, "main"

    def Stream(self) -> Any:
        return SimpleNamespace(name="side", wait_stream=lambda other: self.log.append(f"side waits for {other}"))

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"event on {stream.name}"),
            synchronize=lambda: self.log.append("host waits"),
        )

    def current_stream(self) -> str:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    import torch
    from eldrd_hook import capture

    cuda = FakeCuda([])
    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        if pin_memory:
            cuda.log.append(f"copy on {cuda.now}")
        return empty(*args, **kwargs)

    monkeypatch.setattr(capture.torch, "cuda", cuda)
    monkeypatch.setattr(capture.torch, "empty", pinned)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, s: cuda.log.append(f"kept for {s.name}"), raising=False
    )
    return cuda


def test_copies_go_to_pinned_memory_on_the_side_and_the_step_never_waits(fake: FakeCuda) -> None:
    import torch
    from eldrd_hook import capture

    held, ready = capture.SideCopy().start(torch.arange(4), None, torch.ones(2))
    assert fake.log == [
        "side waits for main", "copy on side", "kept for side", "copy on side", "kept for side", "event on side",
    ]  # fmt: skip
    assert held[1] is None
    assert held[0] is not None
    snapshot = capture.Snapshot(held[0], None, ready)
    assert snapshot.arrays()[0].tolist() == [0, 1, 2, 3]
    assert fake.log[-1] == "host waits", "only the counting thread waits"


def test_a_snapshot_is_the_buffers_state_at_its_step(fake: FakeCuda) -> None:
    """vLLM writes the next step's ids and slots while the copy may still run: both were cloned, and read rows are blank."""
    import torch
    from eldrd_hook import capture
    from eldrd_hook.attribution import SENTINEL

    c = object.__new__(capture.Capture)
    c._buffer = torch.arange(2 * 3 * 2, dtype=torch.int16).reshape(2, 3, 2)
    c._layers = {0: None, 2: None}
    c._columns = torch.tensor([0, 2])
    c._side = capture.SideCopy()
    slots = torch.tensor([7, 8])
    snapshot = c.snapshot(1, slots)
    assert (c._buffer[0] == SENTINEL).all()
    assert (c._buffer[1] != SENTINEL).all()
    c._buffer.fill_(99)
    slots.fill_(0)
    ids, where = snapshot.arrays()
    assert ids.tolist() == [[[0, 1], [4, 5]]]
    assert where is not None
    assert where.tolist() == [7, 8]
