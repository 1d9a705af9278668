"""What the hook refuses, and its copies to the host, with stand-ins for vLLM's configuration and for CUDA."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
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


class Pushed:
    """A pusher that keeps the totals of steps and when they came."""

    def __init__(self) -> None:
        self.totals: list[tuple[float, Any]] = []

    def start(self) -> None: ...

    def close(self) -> None: ...

    def push(self, counted: Any) -> None: ...

    def push_steps(self, totals: Any) -> None:
        self.totals.append((time.monotonic(), totals))


def test_totals_of_steps_go_out_at_intervals_when_idle_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from eldrd_hook import attribution, steps, worker

    monkeypatch.setattr(worker, "_STEPS_SECONDS", 0.2)
    pushed: Any = Pushed()
    counter = worker._Counter(attribution.Attributor(1, 4, 32, blocks=False), steps.Meter(4), pushed, 32)
    ids = np.array([[[0, 1]], [[1, 2]]], np.int16)
    job = worker._Job(
        attribution.Step(requests=2, tokens=2),
        None,
        cast("Any", SimpleNamespace(nbytes=ids.nbytes, arrays=lambda: (ids, None))),
    )
    begin, put = time.monotonic(), 0
    while len(pushed.totals) < 3:
        assert time.monotonic() < begin + 60
        counter.put(job)
        put += 1
        time.sleep(0.01)
    while pushed.totals[-1][1].steps < put:
        assert time.monotonic() < begin + 60
        time.sleep(0.01)
    busy = len(pushed.totals)
    # The first at once, then one an interval, the last ones after the last step: far fewer than steps, however late.
    assert busy <= 2 + (time.monotonic() - begin) / 0.2
    made = pushed.totals[-1][1]
    assert (made.requests, made.active, made.missed) == (2 * made.steps, 3 * made.steps, 0)
    time.sleep(0.5)
    assert len(pushed.totals) == busy, "no steps, no message"
    for _ in range(2):
        counter.put(worker._Job(job.step, None, None))
    counter.close()
    assert (pushed.totals[-1][1].steps, pushed.totals[-1][1].missed) == (made.steps, 2)


def scheduled(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """A SchedulerOutput as far as steps are concerned: by request the tokens computed and scheduled."""
    both = {**new, **cached}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=start) for r, (start, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
        num_scheduled_tokens={r: n for r, (_, n) in both.items()},
        total_num_scheduled_tokens=sum(n for _, n in both.values()),
    )


@pytest.mark.parametrize(
    ("new", "cached", "counted"),
    [
        ({}, {}, (0, 0)),
        ({"a": (0, 10)}, {}, (0, 0)),
        ({}, {"a": (4, 6)}, (0, 0)),
        # One token of a prompt that is not its last one.
        ({}, {"a": (4, 1)}, (0, 0)),
        # What a decode server begins with, and how it goes on.
        ({"a": (9, 1)}, {}, (1, 1)),
        ({}, {"a": (12, 1)}, (1, 1)),
        # Prefill mixed in counts for its weights too; generated tokens computed again after a preemption are no decode.
        ({"b": (0, 7)}, {"a": (12, 1)}, (2, 8)),
        ({}, {"a": (0, 12)}, (0, 0)),
    ],
)
def test_steps_that_decode(new: Any, cached: Any, counted: tuple[int, int]) -> None:
    """Prompts of 10 tokens, on a decode server that need not know the requests for anything else."""
    from eldrd_hook.connector import EldrConnector

    connector = EldrConnector.__new__(EldrConnector)
    for name in ("_requests", "_prompts", "_closed", "_last_hashes"):
        setattr(connector, name, {})
    connector.failed, connector._blocks, connector._decode = False, False, True
    for request in ("a", "b"):
        connector.on_new_request(SimpleNamespace(request_id=request, num_prompt_tokens=10, kv_transfer_params=None))
    step = connector.build_connector_meta(scheduled(new, cached)).step
    assert not connector.failed
    assert (step.requests, step.tokens) == counted
    assert bool(step) == (counted != (0, 0))
    connector._decode = False
    step = connector.build_connector_meta(scheduled(new, cached)).step
    assert (step.requests, step.tokens) == (0, 0)
