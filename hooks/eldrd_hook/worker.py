"""The worker's side: takes each step's captured ids and counts them in a thread. No scheduler state, no sockets.

On the engine's thread a step costs one copy of its ids. Steps wait in a bounded line; when it is full a step's ids are
let go, and its requests are reported partial.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eldrd_hook import __version__, attribution, capture, fingerprint, push, steps, wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

log = logging.getLogger("vllm.eldrd_hook")

_BACKLOG_BYTES = 256 << 20
_STEPS_SECONDS = 1.0


@dataclass(slots=True)
class _Order:
    """Row order of a step where vLLM tells it (Model Runner V2)."""

    requests: list[str]
    scheduled: Mapping[str, int]

    @property
    def rows(self) -> int:
        return sum(self.scheduled[r] for r in self.requests)


@dataclass(slots=True)
class _Job:
    step: attribution.Step
    order: _Order | None
    snapshot: capture.Snapshot | None


class Worker:
    """Capture, attribution and push of one worker process. Only the first tensor-parallel rank counts and pushes."""

    def __init__(
        self,
        config: Any,
        *,
        endpoints: Sequence[str],
        name: str,
        phase: str,
        hash_block_size: int,
        slot_layer: str,
        slot_block_size: int,
        queue_bytes: int,
        row_bytes: int,
    ) -> None:
        """Binds the model's layers; raises capture.UnseenError where the experts cannot be seen.

        slot_layer, slot_block_size: an attention layer of the group whose slots locate the tokens, and its block size.
        """
        from vllm.distributed.parallel_state import get_tp_group

        self._capture = capture.of_process(config)
        self._capture.bind_model(config)
        self._slot_layer, self._slot_block_size = slot_layer, slot_block_size
        self._order: _Order | None = None
        self._slots: torch.Tensor | None = None
        self._counter: _Counter | None = None
        if not get_tp_group().is_first_rank:
            return
        hello = _hello(config, self._capture, name=name, phase=phase, block_size=hash_block_size)
        pusher = push.Pusher(endpoints, hello, queue_bytes=queue_bytes, row_bytes=row_bytes)
        attributor = attribution.Attributor(
            len(hello.layers), hello.experts, hash_block_size, blocks=phase != "decode", decode=phase != "prefill"
        )
        self._counter = _Counter(attributor, steps.Meter(hello.experts), pusher, slot_block_size)
        log.info(
            "eldrd hook %s: %d MoE layers x %d experts, top-%d, hash block %d, fingerprint %016x, to %s",
            *(__version__, len(hello.layers), hello.experts, hello.top_k, hash_block_size, hello.fingerprint),
            ", ".join(endpoints),
        )

    def rows(self, forward_context: Any, request_ids: Any, scheduler_output: Any) -> None:
        """Learns which row of the step is which token, from the batch's order or else the slot mapping."""
        if request_ids is not None:
            self._order = _Order(list(request_ids), scheduler_output.num_scheduled_tokens)
            return
        slots = forward_context.slot_mapping
        self._slots = slots.get(self._slot_layer) if isinstance(slots, dict) else None

    def step(self, step: attribution.Step) -> None:
        """Takes one step's captured ids and hands them on."""
        order, slots, self._order, self._slots = self._order, self._slots, None, None
        if self._counter is None or not step:
            return
        snapshot = None
        if (step.chunks or step.tokens) and not self._counter.full:
            if order is not None:
                snapshot = self._capture.snapshot(order.rows, None)
            elif slots is not None:
                snapshot = self._capture.snapshot(len(slots), slots if step.chunks else None)
            elif step.tokens:
                snapshot = self._capture.snapshot(step.tokens, None)
        self._counter.put(_Job(step, order, snapshot))

    def close(self) -> None:
        capture.forget()
        if self._counter is not None:
            self._counter.close()


class _Counter:
    def __init__(
        self, attributor: attribution.Attributor, meter: steps.Meter, pusher: push.Pusher, slot_block_size: int
    ) -> None:
        self._attributor, self._meter, self._pusher = attributor, meter, pusher
        self._slot_block_size = slot_block_size
        self._steps_due = 0.0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._taken = self._counted = 0
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="eldrd-count", daemon=True)
        self._thread.start()
        self._pusher.start()

    @property
    def full(self) -> bool:
        return self._taken - self._counted > _BACKLOG_BYTES

    def put(self, job: _Job) -> None:
        if job.snapshot is not None:
            self._taken += job.snapshot.nbytes
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(2.0)
        self._pusher.close()

    def _run(self) -> None:
        more = True
        while more:
            job = None
            try:
                job = self._jobs.get(timeout=max(0.0, self._steps_due - time.monotonic()) if self._meter.news else None)
                more = job is not None
                if job is not None:
                    self._count(job)
            except queue.Empty:
                pass
            except Exception:
                if not self._complained:
                    self._complained = True
                    log.exception("eldrd hook: counting failed; signatures may be partial (said once)")
            if job is not None and job.snapshot is not None:
                self._counted += job.snapshot.nbytes
            if self._meter.news and (not more or time.monotonic() >= self._steps_due):
                self._steps_due = time.monotonic() + _STEPS_SECONDS
                self._pusher.push_steps(self._meter.totals())

    def _count(self, job: _Job) -> None:
        ids: NDArray[np.int16] | None = None
        rows: list[NDArray[np.int64] | None] = [None] * len(job.step.chunks)
        if job.snapshot is not None:
            ids, slots = job.snapshot.arrays()
            if job.order is not None:
                rows = attribution.rows_by_order(job.step.chunks, job.order.requests, job.order.scheduled)
            elif slots is not None:
                rows = attribution.rows_by_slot(job.step.chunks, slots, self._slot_block_size)
        if job.step.tokens:
            self._meter.count(job.step.requests, job.step.tokens, ids)
        self._pusher.push(self._attributor.count(job.step, rows, ids))


def _hello(config: Any, seen: capture.Capture, *, name: str, phase: str, block_size: int) -> wire.Hello:
    model = config.model_config
    facts = (model.dtype, model.quantization, seen.layers, seen.experts, seen.top_k)
    served = model.served_model_name
    return wire.Hello(
        v=wire.VERSION,
        hook=__version__,
        worker=name,
        phase=phase,
        model=served[0] if isinstance(served, list) else served,
        fingerprint=_fingerprint(model, facts),
        layers=seen.layers,
        experts=seen.experts,
        top_k=seen.top_k,
        block_size=block_size,
        hash_algo=config.cache_config.prefix_caching_hash_algo,
    )


def _fingerprint(model: Any, facts: Sequence[object]) -> int:
    folder = Path(model.model)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        return fingerprint.of_checkpoint(folder, facts)
    except Exception as e:
        log.warning("eldrd hook: the weights cannot be read (%s); %s is identified by its name", e, model.model)
        return fingerprint.of_name(model.model, model.revision, facts)
