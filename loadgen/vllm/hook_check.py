"""One vLLM engine with the hook in this process, held against transformers: ``python -m loadgen.vllm.hook_check CASE``.

Prints a JSON object: the checks of one case of the matrix that a CPU allows. The frames go to eldrd's own receiver.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eldrd.signatures.receiver import Decoded, Signature
    from loadgen.vllm.truth import Truth

OUT = Path("out/vllm")
BLOCK = 32
# For what must come; a busy machine takes its time.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """One request. state: of its signature; exact, near_tie: against the truth; cached: prompt tokens from the prefix
    cache; decoded: generated tokens whose counts came, -1: none came; decode_exact: these counts."""

    label: str
    tokens: int
    state: str
    exact: bool
    near_tie: bool
    cached: int
    decoded: int = -1
    decode_exact: bool = False


class Ears:
    """eldrd's receiver on a loop of its own. To be made after the engine: vLLM 0.32 looks into every loaded module when it
    starts on CPU, and stumbles over llvmlite's."""

    def __init__(self, endpoint: str, kv_events: str = "") -> None:
        from eldrd.signatures.cache import SignatureCache, warm_up
        from eldrd.signatures.receiver import SignatureReceiver
        from eldrd.telemetry.metrics import Metrics

        warm_up()
        self.metrics = Metrics()
        self.cache = SignatureCache(64 << 20)
        self.receiver = SignatureReceiver(self.cache, self.metrics)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        def start() -> None:
            self.receiver.start(endpoint)
            if kv_events:
                self.receiver.events.watch({"p0": kv_events})

        self.call(start)
        while not self.receiver.hooks:
            time.sleep(0.02)

    def call(self, what: Callable[[], Any]) -> Any:
        async def inside() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(_PATIENCE_S)

    def signature(self, eldr_id: str) -> Signature | None:
        found = asyncio.run_coroutine_threadsafe(self.receiver.wait(eldr_id, _PATIENCE_S), self._loop).result()
        self.call(lambda: self.receiver.forget(eldr_id))
        return found

    def decoded(self, eldr_id: str) -> Decoded | None:
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            found: Decoded | None = self.call(lambda: self.receiver.take_decoded(eldr_id))
            if found is not None:
                return found
            time.sleep(0.02)
        return None

    def steps(self) -> tuple[int, int, float]:
        """Decode steps, their requests and their active experts (mean a layer), totals once nothing comes any more: the
        hook tells of them once a second."""
        read, label = self.metrics.registry.get_sample_value, {"worker": "p0"}
        before, since = -1.0, time.monotonic()
        while time.monotonic() < since + 3.0:
            now = self.call(lambda: read("eldrd_worker_step_active_experts_count", label)) or 0.0
            if now != before:
                before, since = now, time.monotonic()
            time.sleep(0.05)
        requests, active = (read(f"eldrd_worker_step_{n}_sum", label) or 0.0 for n in ("requests", "active_experts"))
        return int(before), int(requests), active


class Engine:
    """vLLM with the hook. options: more of LLM's arguments."""

    def __init__(self, model: Path, phase: str = "prefill", *, kv_events: str = "", **options: Any) -> None:
        from eldrd_hook.__main__ import transfer_config
        from vllm import LLM

        endpoint = f"ipc://{tempfile.mkdtemp()}/s"
        self.vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
        self.rng = np.random.default_rng(0)
        self.llm = LLM(
            str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=1024,
            block_size=BLOCK,
            max_num_seqs=8,
            disable_log_stats=True,
            kv_transfer_config=transfer_config("none", [endpoint], worker="p0", phase=phase),
            **{
                "enforce_eager": True,
                "max_num_batched_tokens": 96,
                "kv_cache_memory_bytes": 32 << 20,
                **options,
            },
        )
        self.ears = Ears(endpoint, kv_events)
        self._serial = 0

    def prompt(self, n: int) -> list[int]:
        return [int(t) for t in self.rng.integers(4, self.vocab, n)]

    def run(
        self,
        label: str,
        prompts: Sequence[list[int]],
        truth: Truth | None,
        *,
        tokens: int = 1,
        lora: Any = None,
        salt: str = "",
    ) -> tuple[list[Check], list[list[int]]]:
        """Generates at once; a check of each request (none without a truth) and what it generated."""
        from vllm import SamplingParams

        ids = [f"r{self._serial + i}" for i in range(len(prompts))]
        self._serial += len(prompts)
        if truth is not None:
            for eldr_id in ids:
                self.ears.call(partial(self.ears.receiver.expect, eldr_id))
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": {"eldr_id": i}},
            )
            for i in ids
        ]
        asked = [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts]
        outputs = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        generated = [list(o.outputs[0].token_ids) for o in outputs]
        if self.ears.receiver.decoding:
            # A server goes on for one more step, which brings the news of the last request's end; LLM does not.
            self.llm.generate(
                [{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
            )
        checks = []
        for i, prompt, output, made in zip(ids, prompts, outputs, generated, strict=True):
            if truth is not None:
                checks.append(self._check(f"{label}-{len(prompt)}", i, prompt, made, output.num_cached_tokens, truth))
        return checks, generated

    def _check(self, label: str, eldr_id: str, prompt: list[int], made: list[int], cached: int, truth: Truth) -> Check:
        n = len(prompt)
        routing = truth.routing(prompt + made[:-1])
        signature = self.ears.signature(eldr_id)
        decoded, decode_exact = -1, False
        if self.ears.receiver.decoding:
            counts = self.ears.decoded(eldr_id)
            if counts is not None:
                decoded = counts.tokens
                after = routing.part(n, n + len(made) - 1)
                result = after.compare(counts.counts.reshape(counts.geometry.shape))
                decode_exact = result.exact or result.near_tie
        if signature is None:
            return Check(label, n, "missing", False, False, cached, decoded, decode_exact)
        result = routing.part(0, n).compare(signature.counts.reshape(signature.geometry.shape))
        return Check(label, n, signature.state, result.exact, result.near_tie, cached, decoded, decode_exact)


def _standard(engine: Engine, truth: Truth) -> list[Check]:
    """Cold, chunked, the same again, chunked behind a hit, a batch with decode mixed in."""
    long = engine.prompt(333)
    checks = engine.run("cold", [engine.prompt(57)], truth)[0]
    checks += engine.run("chunked", [long], truth)[0]
    checks += engine.run("again", [long], truth)[0]
    checks += engine.run("hit", [long[:200] + engine.prompt(277)], truth)[0]
    prompts = [engine.prompt(n) for n in (1, 31, 32, 70, 130)] + [long[:170]]
    return checks + engine.run("batch", prompts, truth, tokens=8)[0]


def _architecture(name: str) -> dict[str, Any]:
    from loadgen.vllm.truth import Truth
    from loadgen.vllm.variants import make_variant

    model = make_variant(name, OUT / name)
    engine = Engine(model)
    geometry_layers = None
    checks = _standard(engine, Truth(model))
    if engine.ears.receiver.geometry is not None:
        geometry_layers = list(engine.ears.receiver.geometry.layers)
    return {"checks": checks, "layers": geometry_layers}


def _qwen(phase: str = "prefill", **options: Any) -> tuple[Engine, Truth]:
    from loadgen.vllm.model import make_model
    from loadgen.vllm.truth import Truth

    model = make_model(OUT / "model")
    return Engine(model, phase, **options), Truth(model)


def tensor_parallel() -> dict[str, Any]:
    engine, truth = _qwen(tensor_parallel_size=2)
    return {"checks": _standard(engine, truth)}


def both() -> dict[str, Any]:
    """A plain server: generated tokens are counted, and a chat's next turn hits blocks that generation completed."""
    preempted = _count_preemptions()
    engine, truth = _qwen("both", kv_cache_memory_bytes=14 << 20)
    prompts = [engine.prompt(n) for n in (5, 40, 64, 100)]
    checks, made = engine.run("first", prompts, truth, tokens=90)
    turns = [p + m + engine.prompt(10) for p, m in zip(prompts, made, strict=True)]
    checks += engine.run("turn", turns, truth, tokens=3)[0]
    steps = _steps(engine, truth)
    # Long outputs in a small cache: requests are preempted while they generate.
    checks += engine.run("long", [engine.prompt(250) for _ in range(8)], truth, tokens=300)[0]
    return {"checks": checks, "preempted": len(preempted), "steps": steps}


def _steps(engine: Engine, truth: Truth) -> dict[str, Any]:
    """Four prompts that one step prefills generate side by side: what the hook measured of their steps beside the truth."""
    before = engine.ears.steps()
    prompts = [engine.prompt(n) for n in (5, 9, 14, 20)]
    _, made = engine.run("steps", prompts, None, tokens=30)
    after = engine.ears.steps()
    routed = [truth.routing(p + m[:-1]).part(len(p), len(p) + 29).experts for p, m in zip(prompts, made, strict=True)]
    together = np.concatenate(routed, axis=2)
    active = sum(len(set(layer)) for step in together.tolist() for layer in step) / together.shape[1]
    # run's last request, a prompt of one token, is a step that decodes.
    alone = routed[0].shape[2]
    return {
        "measured": [now - then for then, now in zip(before, after, strict=True)],
        "truth": [29 + 1, 4 * 29 + 1, active + alone],
    }


def _count_preemptions() -> list[str]:
    """The names of requests that are preempted from now on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    return preempted


def _experts_without_lora() -> None:
    """vLLM 0.32 takes Triton's kernel for the experts of any server with LoRA, which a CPU does not have; adapters of the
    attention alone need no such kernel."""
    from vllm.model_executor.layers.fused_moe import layer

    config = layer.FusedMoEConfig
    layer.FusedMoEConfig = lambda **fields: config(**{**fields, "is_lora_enabled": False})


def keys() -> dict[str, Any]:
    """LoRA and cache_salt: the same prompt under other keys is computed anew and counted right."""
    from vllm.lora.request import LoRARequest

    from loadgen.vllm.truth import Truth
    from loadgen.vllm.variants import make_adapter, merge_adapter

    _experts_without_lora()
    engine, truth = _qwen(enable_lora=True, max_lora_rank=8, lora_target_modules=["qkv_proj"])
    adapter = make_adapter(OUT / "model", OUT / "adapter")
    merged = Truth(OUT / "model")
    merge_adapter(merged.model, adapter)
    lora = LoRARequest("a", 1, str(adapter.resolve()))
    prompt = engine.prompt(150)
    checks = engine.run("plain", [prompt], truth)[0]
    checks += engine.run("lora", [prompt], merged, lora=lora)[0]
    checks += engine.run("lora-again", [prompt], merged, lora=lora)[0]
    for salt in ("a", "b", "a"):
        checks += engine.run(f"salt-{salt}", [prompt], truth, salt=salt)[0]
    checks += engine.run("plain-again", [prompt], truth)[0]
    moved = int(np.abs(truth.routing(prompt).counts - merged.routing(prompt).counts).sum()) // 2
    return {"checks": checks, "rows": len(engine.ears.cache), "lora_moves": moved}


def events() -> dict[str, Any]:
    """A small KV cache and hundreds of requests: afterwards rows and vLLM's prefix cache hold the same blocks."""
    from vllm.config import KVEventsConfig

    address = f"ipc://@eldrd-kv-{os.getpid()}"
    publish = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=address)
    engine, truth = _qwen(kv_events=address, kv_events_config=publish, kv_cache_memory_bytes=12 << 20)
    shared = [engine.prompt(96) for _ in range(6)]
    sent = 0
    for _ in range(63):
        batch = [
            shared[int(engine.rng.integers(6))] + engine.prompt(int(engine.rng.integers(1, 150))) for _ in range(8)
        ]
        engine.run("fill", batch, None)
        sent += len(batch)
    checks = engine.run("after", [shared[0] + engine.prompt(40)], truth)[0]
    held = _prefix_cache(engine)
    geometry = engine.ears.receiver.geometry
    assert geometry is not None
    ears = engine.ears
    _rows(ears, len(held))
    lacking = len(ears.call(lambda: ears.cache.lacking(geometry, np.array(sorted(held), np.uint64))))
    result = {"requests": sent, "held": len(held), "rows": len(ears.cache), "lacking": lacking}
    counted = {
        k: ears.metrics.registry.get_sample_value("eldrd_kv_events_total", {"kind": k}) for k in ("removed", "lost")
    }
    engine.llm.reset_prefix_cache()
    engine.run("tick", [engine.prompt(5)], None)
    _rows(ears, 0)
    return {"checks": checks, **result, **counted, "rows_after_reset": len(ears.cache)}


def _rows(ears: Ears, n: int) -> None:
    """Wait until the cache has so many rows and keeps them, or patience ends: the events come by a socket of their own."""
    end, since = time.monotonic() + _PATIENCE_S, time.monotonic()
    while time.monotonic() < min(end, since + 1.5):
        if len(ears.cache) != n:
            since = time.monotonic()
        time.sleep(0.02)


def _prefix_cache(engine: Engine) -> set[int]:
    """Low 64 bits of the hashes in vLLM's own table."""
    pool = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    found = set()
    for block in pool.blocks:
        if block.block_hash is not None:
            # A key is the hash and four bytes of the KV-cache group (vllm/v1/core/kv_cache_utils.py).
            found.add(int.from_bytes(block.block_hash[:-4][-8:], "big"))
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "glm4_moe": lambda: _architecture("glm4_moe"),
    "gpt_oss": lambda: _architecture("gpt_oss"),
    "olmoe": lambda: _architecture("olmoe"),
    "tensor_parallel": tensor_parallel,
    "both": both,
    "keys": keys,
    "events": events,
}


def main() -> None:
    case = sys.argv[1]
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    found = CASES[case]()
    found["checks"] = [asdict(c) for c in found["checks"]]
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    # Engine and receiver threads have nothing left to do, and vLLM's shutdown takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
