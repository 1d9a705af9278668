"""EldrConnector, a KV connector that moves no KV: it tells the worker which tokens a step computes, and counts.

Runs beside the connector that moves the KV, below vLLM's MultiConnector. The scheduler's side only reads the schedule;
the worker's side hands each step to a thread (``worker.py``). No exception of the hook's reaches the engine once it has
started; what could not be counted is said to be partial.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from eldrd_hook import attribution, capture, worker

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("vllm.eldrd_hook")

PHASES = ("prefill", "decode", "both")

F = TypeVar("F", bound="Callable[..., Any]")


@dataclass
class EldrMetadata(KVConnectorMetadata):
    """A step's metadata on its way from the scheduler to the workers."""

    step: attribution.Step = field(default_factory=attribution.Step)


def _harmless(otherwise: Callable[[], object]) -> Callable[[F], F]:
    """Keeps the hook's troubles from the engine: an exception is logged once, and ``otherwise()`` is the result."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def call(self: EldrConnector, *args: Any, **kwargs: Any) -> object:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                if not self.failed:
                    self.failed = True
                    log.exception("eldrd hook: %s failed; signatures may be partial (said once)", method.__name__)
                return otherwise()

        return cast("F", call)

    return wrap


def _nothing() -> None:
    return None


class EldrConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides of the connector, as vLLM wants them.

    kv_connector_extra_config: ``eldr_endpoints`` (ZMQ addresses of the daemons), ``eldr_worker`` (this server's name),
    ``eldr_phase``, ``eldr_queue_bytes``, ``eldr_row_bytes``. Phase ``prefill`` counts the blocks of prompts, ``decode``
    the generated tokens of requests with an ``eldr_id``, ``both`` both, and the blocks that generation completes.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        self.failed = False
        extra = self._kv_transfer_config.kv_connector_extra_config
        phase = _phase(extra)
        self._blocks, self._decode = phase != "decode", phase != "prefill"
        capture.check(vllm_config, decode=self._decode)
        _, self._hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        group = _full_attention_group(kv_cache_config)
        self._group = group
        self._group_block_size: int = kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        self._requests: dict[str, Any] = {}
        self._prompts: dict[str, int] = {}
        self._unopened: set[str] = set()
        self._sent: dict[str, int] = {}
        self._closed: dict[str, int] = {}
        self._last_hashes: dict[str, tuple[int, list[int]]] = {}
        self._worker: worker.Worker | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = worker.Worker(
                vllm_config,
                endpoints=_endpoints(extra),
                name=str(extra.get("eldr_worker") or f"{socket.gethostname()}:{os.getpid()}"),
                phase=phase,
                hash_block_size=self._hash_block_size,
                slot_layer=kv_cache_config.kv_cache_groups[group].layer_names[0],
                slot_block_size=self._group_block_size,
                queue_bytes=int(extra.get("eldr_queue_bytes", 64 << 20)),
                row_bytes=int(extra.get("eldr_row_bytes", 256 << 20)),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preempted prompt need not be computed again for our sake."""
        return False

    # The scheduler's side.

    @_harmless(_nothing)
    def on_new_request(self, request: Any) -> None:
        if self._decode:
            self._prompts[request.request_id] = request.num_prompt_tokens
        if not self._blocks and _eldr_id(request) is None:
            return
        self._requests[request.request_id] = request
        self._unopened.add(request.request_id)
        self._sent[request.request_id] = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        return

    @_harmless(EldrMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> EldrMetadata:
        step = attribution.Step()
        step.closed, self._closed = self._closed, {}
        step.hashes, self._last_hashes = self._last_hashes, {}
        metadata = EldrMetadata(step)
        scheduled = scheduler_output.num_scheduled_tokens
        if self._decode and self._decodes(scheduler_output):
            step.requests, step.tokens = len(scheduled), scheduler_output.total_num_scheduled_tokens
        if not self._requests:
            return metadata
        cached = scheduler_output.scheduled_cached_reqs
        starts = [(r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs]
        starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, start in starts:
            request = self._requests.get(request_id)
            if request is None:
                continue
            stop, prompt = start + scheduled[request_id], request.num_prompt_tokens
            parts = [(start, min(stop, prompt))] if self._blocks else []
            parts += [(max(start, prompt), stop)] if self._decode else []
            for first, last in parts:
                if last > first:
                    self._add(step, request, first, last, first - start, scheduler_output.kv_connector_block_state)
        return metadata

    def _decodes(self, scheduler_output: Any) -> bool:
        """Whether the step computes one token of a request whose prompt is behind it; a decode server computes the
        prompt's last token itself. The first request that runs mostly says yes, so that nobody walks over the batch."""
        scheduled, prompts = scheduler_output.num_scheduled_tokens, self._prompts
        cached = scheduler_output.scheduled_cached_reqs
        running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        new = ((r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs)
        return any(
            scheduled[request_id] == 1 and start + 1 >= prompts.get(request_id, math.inf)
            for request_id, start in itertools.chain(running, new)
        )

    def _add(self, step: attribution.Step, request: Any, start: int, stop: int, skip: int, blocks: Any) -> None:
        request_id: str = request.request_id
        if request_id in self._unopened:
            # Only now is the prompt's length final: the connector that moves the KV may have cut it before.
            self._unopened.discard(request_id)
            step.opened.append(attribution.Opened(request_id, _eldr_id(request), request.num_prompt_tokens))
        if (fresh := self._fresh_hashes(request)) is not None:
            step.hashes[request_id] = fresh
        table = blocks.get_block_ids(request_id)[self._group]
        size = self._group_block_size
        physical = tuple(table[start // size : (stop - 1) // size + 1])
        step.chunks.append(attribution.Chunk(request_id, start, stop, physical, skip))

    def _fresh_hashes(self, request: Any) -> tuple[int, list[int]] | None:
        """The request's block hashes that the worker does not have yet, behind the index of the first."""
        sent = self._sent[request.request_id]
        if not self._blocks or len(request.block_hashes) == sent:
            return None
        fresh = [attribution.low64(h) for h in request.block_hashes[sent:]]
        self._sent[request.request_id] = sent + len(fresh)
        return sent, fresh

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_harmless(lambda: (False, None))
    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Acknowledges a prompt in the response: ``{"eldr": {"id": ..., "blocks": full blocks of the prompt}}``."""
        request_id = request.request_id
        if request_id in self._requests and request_id not in self._unopened:
            self._closed[request_id] = request.num_output_tokens
            # Blocks that the last step completed got their hashes only now.
            if self._decode and (fresh := self._fresh_hashes(request)) is not None:
                self._last_hashes[request_id] = fresh
        self._requests.pop(request_id, None)
        self._prompts.pop(request_id, None)
        self._sent.pop(request_id, None)
        self._unopened.discard(request_id)
        key = _eldr_id(request)
        if key is None or not self._blocks:
            return False, None
        return False, {"eldr": {"id": key, "blocks": request.num_prompt_tokens // self._hash_block_size}}

    # The workers' side.

    @_harmless(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.rows(forward_context, kwargs.get("request_ids"), kwargs.get("scheduler_output"))

    def wait_for_layer_load(self, _: str) -> None:
        return

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        return

    @_harmless(_nothing)
    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, EldrMetadata):
            self._worker.step(metadata.step)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _eldr_id(request: Any) -> str | None:
    key = (request.kv_transfer_params or {}).get("eldr_id")
    return None if key is None else str(key)


def _phase(extra: dict[str, Any]) -> str:
    phase = str(extra.get("eldr_phase", "prefill"))
    if phase not in PHASES:
        raise ValueError(f"eldrd hook: eldr_phase is {phase!r}; it must be one of {', '.join(PHASES)}")
    return phase


def _endpoints(extra: dict[str, Any]) -> list[str]:
    endpoints = extra.get("eldr_endpoints")
    if not isinstance(endpoints, list) or not endpoints or not all(isinstance(e, str) for e in endpoints):
        raise ValueError(
            'eldrd hook: kv_connector_extra_config must hold "eldr_endpoints", a list of ZMQ addresses such as '
            "tcp://127.0.0.1:5601; `python -m eldrd_hook --help` prints the whole configuration"
        )
    return endpoints


def _full_attention_group(kv_cache_config: Any) -> int:
    """The first KV-cache group that keeps all of a request's blocks."""
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        kind = type(group.kv_cache_spec).__name__
        if not any(word in kind for word in ("Sliding", "Chunked", "Mamba")):
            return i
    return 0
