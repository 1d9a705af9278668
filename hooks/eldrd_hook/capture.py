"""Expert ids as vLLM's routers choose them, in a buffer of our own. torch and vLLM; no counting, no connector.

vLLM calls ``BaseRouter.set_capture_fn``'s function with the logical top-k ids before expert load balancing maps them
(vllm/model_executor/layers/fused_moe/router/base_router.py); kernels that route inside report through
``routing_sink``. Where neither is possible, ``UnseenError`` names the remedy, and the server does not start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from eldrd_hook.attribution import SENTINEL

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


class UnseenError(ValueError):
    """The experts of this model cannot be seen under this configuration."""


@torch.library.custom_op("eldrd::capture", mutates_args=("buffer",))
def _capture(ids: torch.Tensor, buffer: torch.Tensor, layer: int) -> None:
    n = min(ids.shape[0], buffer.shape[0])
    buffer[:n, layer] = ids[:n].to(buffer.dtype)


@_capture.register_fake
def _(ids: torch.Tensor, buffer: torch.Tensor, layer: int) -> None:  # noqa: ARG001 - the signature must match
    return None


@dataclass(slots=True)
class Snapshot:
    """One step's captured ids and slot mapping, on their way to the host."""

    _ids: torch.Tensor
    _slots: torch.Tensor | None
    _ready: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes

    def arrays(self) -> tuple[NDArray[np.int16], NDArray[np.int64] | None]:
        """ids int16 [rows, L, k] and slots int64 [rows]. Waits for the copy; not for the engine's thread."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._ids.numpy(), None if self._slots is None else self._slots.numpy()


class SideCopy:
    """Copies of device tensors to pinned host memory on a stream of their own, so that the next step need not wait for
    them. Nothing here makes the host wait for the device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def start(self, *tensors: torch.Tensor | None) -> tuple[list[torch.Tensor | None], torch.cuda.Event]:
        """Begins copies behind what the current stream has been given; the host tensors, and the event of their end.

        The tensors must not be written again: give clones of buffers that vLLM reuses.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            held = [None if t is None else self._host(t) for t in tensors]
        ready = torch.cuda.Event()
        ready.record(self._stream)
        return held, ready

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        held.copy_(tensor, non_blocking=True)
        # Its memory goes back to the main stream's pool, which must not give it away before this stream has read it.
        tensor.record_stream(self._stream)
        return held


class Capture:
    """The buffer [tokens a step, layers, top-k] of one worker process and the layers that write to it."""

    def __init__(self, config: Any) -> None:
        from vllm.platforms import current_platform

        model = config.model_config
        self.top_k: int = model.get_num_experts_per_tok()
        self.experts: int = model.get_num_experts()
        self._hidden_layers: int = model.get_total_num_hidden_layers()
        self._buffer = torch.full(
            (config.scheduler_config.max_num_batched_tokens, self._hidden_layers, self.top_k),
            SENTINEL,
            dtype=torch.int16,
            device=current_platform.device_type,
        )
        self._side = SideCopy() if self._buffer.device.type == "cuda" else None
        self._columns: torch.Tensor | None = None
        self._traced = traced(config)
        self._layers: dict[int, Any] = {}
        self._early: set[int] = set()

    @property
    def layers(self) -> list[int]:
        """Ids of the layers seen, ascending."""
        return sorted(self._layers)

    def bind(self, runner: Any, *, early: bool = False) -> None:
        """Makes one MoE layer write here. early: the model is still being built, its kernel is not chosen yet."""
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        layer: int = runner.layer_id
        if not 0 <= layer < self._hidden_layers:
            return  # layers of a draft model (MTP) decide nothing about the prompt's KV
        if early:
            self._early.add(layer)
        method = runner.routed_experts.quant_method
        if not early and method.is_monolithic:
            self._bind_kernel(runner, method, layer)
        elif isinstance(runner.router, BaseRouter):
            if not early and self._traced and layer not in self._early:
                raise UnseenError(
                    "torch.compile traces the router here, and the hook came after it: let vLLM load the plugin "
                    "eldrd_hook (is it missing from VLLM_PLUGINS?) or serve with --enforce-eager"
                )
            if layer not in self._layers:
                runner.router.set_capture_fn(self._writer(layer))
        else:
            raise UnseenError(
                f"the router {type(runner.router).__name__} shows no expert ids; another --moe-backend may"
            )
        self._layers[layer] = runner

    def bind_model(self, config: Any) -> None:
        """Makes every MoE layer of the loaded model write here. Raises UnseenError."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        for module in config.compilation_config.static_forward_context.values():
            if isinstance(module, MoERunner):
                self.bind(module)
        if not self._layers:
            raise UnseenError("no layer of this model routes through vLLM's MoE runner")
        # On the device once: an index from the host in every step would be a copy that the step waits for.
        self._columns = torch.tensor(self.layers, device=self._buffer.device)
        self._buffer.fill_(SENTINEL)

    def _bind_kernel(self, runner: Any, method: Any, layer: int) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsSink

        kernel = getattr(getattr(getattr(method, "moe_kernel", None), "impl", None), "fused_experts", None)
        replays = getattr(kernel, "supports_routing_replay_capture", None)
        if kernel is None or replays is None or not replays():
            raise UnseenError(
                f"{type(kernel or method).__name__} routes inside its kernel and does not report the experts: "
                "choose another kernel, --moe-backend triton or marlin, say"
            )
        runner.routed_experts.routing_sink = RoutedExpertsSink(kernel.moe_config, self._writer(layer))

    def _writer(self, layer: int) -> Callable[[torch.Tensor], None]:
        buffer = self._buffer
        if self._traced:
            return lambda ids: _capture(ids, buffer, layer)

        def write(ids: torch.Tensor) -> None:
            n = min(ids.shape[0], buffer.shape[0])
            buffer[:n, layer] = ids[:n]

        return write

    def snapshot(self, rows: int, slots: torch.Tensor | None) -> Snapshot:
        """Takes the ids of the step's first ``rows`` rows and marks them as read, so that a layer that stops writing
        shows. Ordered on the device's stream after the forward pass; never waits for it."""
        assert self._columns is not None
        written = self._buffer[:rows]
        ids = written.index_select(1, self._columns)
        written.fill_(SENTINEL)
        slots = None if slots is None else slots.clone()
        if self._side is None:
            return Snapshot(ids, slots)
        (held, where), ready = self._side.start(ids, slots)
        assert held is not None
        return Snapshot(held, where, ready)


def traced(config: Any) -> bool:
    """Whether Dynamo traces into the MoE layer: on CPU it is no opaque op (fused_moe/runner/moe_runner.py)."""
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu()) and config.compilation_config.mode not in (None, CompilationMode.NONE)


def check(config: Any, *, decode: bool = False) -> None:
    """Refuses configurations under which counts would be missing or wrong. Raises UnseenError with the remedy.

    decode: whether generated tokens are to be counted.
    """
    parallel = config.parallel_config
    if config.model_config.get_num_experts() <= 0:
        raise UnseenError("this model has no experts: take EldrConnector out of --kv-transfer-config")
    if config.aux_output_config.enable_return_routed_experts:
        raise UnseenError("--enable-return-routed-experts replaces the hook's callbacks: drop that flag")
    for flag, value in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if value > 1:
            raise UnseenError(f"a worker does not see all tokens and layers of its requests: serve with {flag} 1")
    if parallel.enable_dbo:
        raise UnseenError("dual batch overlap splits a step's tokens: drop --enable-dbo")
    if decode and config.speculative_config is not None:
        raise UnseenError(
            "rejected drafts cannot be told from generated tokens: drop --speculative-config, or count prompts only "
            "(--phase prefill; on a decode server take EldrConnector out)"
        )


_capture_of_process: Capture | None = None


def of_process(config: Any) -> Capture:
    """The worker process's capture, made on first use: by the plugin where the model is traced, else the connector."""
    global _capture_of_process
    if _capture_of_process is None:
        _capture_of_process = Capture(config)
    return _capture_of_process


def forget() -> None:
    """Lets a second engine in the same process have a capture of its own."""
    global _capture_of_process
    _capture_of_process = None
