"""The hook in a real vLLM engine in this process: signatures must equal the routing of transformers in float32."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq

from eldrd.signatures import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eldrd.signatures.geometry import Geometry
    from loadgen.vllm.truth import Truth

pytestmark = pytest.mark.vllm

BLOCK = 32
MODEL = Path("out/vllm/model")


@dataclass
class Daemon:
    """A stand-in for eldrd: a ROUTER that keeps rows and request records as the frames say."""

    endpoint: str
    geometry: Geometry | None = None
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    requests: dict[str, tuple[wire.Request, np.ndarray, np.ndarray]] = field(default_factory=dict)
    seqs: list[int] = field(default_factory=list)
    stop: bool = False

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(self.endpoint)
            while not self.stop:
                if router.poll(50):
                    self.take(router.recv_multipart()[1:])

    def take(self, frames: list[bytes]) -> None:
        header = wire.decode_header(frames[0])
        if isinstance(header, wire.Hello):
            self.geometry = header.geometry()
            return
        assert self.geometry is not None, "the hook must say hello first"
        assert isinstance(header, wire.Blocks | wire.Request)
        self.seqs.append(header.seq)
        if isinstance(header, wire.Blocks):
            hashes = wire.hashes(frames, header.n)
            for h, row in zip(hashes.tolist(), wire.counts(frames, header.n, header.dtype, self.geometry), strict=True):
                self.rows.setdefault(h, row)
        else:
            tail = wire.counts(frames, 1, header.dtype, self.geometry)[0]
            self.requests[header.id] = (header, wire.hashes(frames, header.blocks), tail)

    def signature(self, key: str) -> tuple[wire.Request, np.ndarray]:
        """The summed signature [L, E], once the record is here."""
        deadline = time.monotonic() + 60
        while key not in self.requests:
            assert time.monotonic() < deadline, f"no record of {key}"
            time.sleep(0.01)
        header, hashes, tail = self.requests[key]
        assert self.geometry is not None
        total = tail.astype(np.int64)
        for h in hashes.tolist():
            total += self.rows[h]
        return header, total.reshape(self.geometry.shape)


@dataclass
class Engine:
    llm: Any
    daemon: Daemon
    truth: Truth
    preemptions: list[int]
    serial: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def prompt(self, n: int) -> list[int]:
        return [int(t) for t in self.rng.integers(4, 4096, n)]

    def run(self, prompts: list[list[int]], tokens: int = 1) -> list[str]:
        """Generates, checks every signature against the truth, and gives back the outputs' eldr_ids."""
        from vllm import SamplingParams

        keys = [f"r{self.serial + i}" for i in range(len(prompts))]
        self.serial += len(prompts)
        sampling = [
            SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, extra_args={"kv_transfer_params": {"eldr_id": k}}
            )
            for k in keys
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        for key, prompt, output in zip(keys, prompts, outputs, strict=True):
            header, got = self.daemon.signature(key)
            assert (header.tokens, header.blocks, header.tail) == (len(prompt), *divmod(len(prompt), BLOCK))
            assert not header.partial
            assert output.kv_transfer_params == {"eldr": {"id": key, "blocks": len(prompt) // BLOCK}}
            routing = self.truth.routing(prompt)
            result = routing.compare(got)
            assert result.exact or result.near_tie, f"{key}: {result}, narrowest gap {routing.gap:.1e}"
            if not result.exact:
                print(f"near tie: {result.moved} choices of {key} moved, narrowest gap {routing.gap:.1e}")
        self.cached = [o.num_cached_tokens for o in outputs]
        return keys


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    from eldrd_hook.__main__ import transfer_config
    from vllm import LLM
    from vllm.v1.core.sched.scheduler import Scheduler

    from loadgen.vllm.model import make_model
    from loadgen.vllm.truth import Truth

    model = make_model(MODEL)
    daemon = Daemon(f"ipc://{tmp_path_factory.mktemp('zmq')}/s")
    thread = threading.Thread(target=daemon.run, daemon=True)
    thread.start()
    preemptions: list[int] = []
    preempt = Scheduler._preempt_request

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        preemptions.append(1)
        return preempt(self, *args, **kwargs)

    Scheduler._preempt_request = counted
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=os.environ.get("ELDRD_TEST_COMPILE") != "1",
        max_model_len=1024,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=14 << 20,
        disable_log_stats=True,
        kv_transfer_config=transfer_config("none", [daemon.endpoint], worker="p0"),
    )
    yield Engine(llm, daemon, Truth(model), preemptions)
    llm.llm_engine.engine_core.shutdown()
    daemon.stop = True
    thread.join()
    Scheduler._preempt_request = preempt


def _config(**changes: Any) -> Any:
    """The parts of a VllmConfig that the hook checks, of a server that it accepts."""
    parallel = dict.fromkeys(
        [
            "pipeline_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ],
        1,
    )
    experts = changes.pop("experts", 32)
    routed = changes.pop("enable_return_routed_experts", False)
    return SimpleNamespace(
        model_config=SimpleNamespace(get_num_experts=lambda: experts),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=routed),
        parallel_config=SimpleNamespace(**{**parallel, "enable_dbo": False, **changes}),
        speculative_config=None,
    )


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"experts": 0}, "take EldrConnector out"),
        ({"enable_return_routed_experts": True}, "drop that flag"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ({"data_parallel_size": 2}, "--data-parallel-size 1"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 1"),
        ({"enable_dbo": True}, "--enable-dbo"),
    ],
)
def test_refuses_what_it_cannot_see(change: dict[str, Any], remedy: str) -> None:
    from eldrd_hook import capture

    capture.check(_config())
    with pytest.raises(capture.UnseenError, match=remedy):
        capture.check(_config(**change))


def test_refuses_kernels_and_routers_that_do_not_report(engine: Engine) -> None:
    from eldrd_hook import capture

    seen = capture.of_process(None)
    method = SimpleNamespace(is_monolithic=True)
    runner = SimpleNamespace(layer_id=0, router=object(), routed_experts=SimpleNamespace(quant_method=method))
    with pytest.raises(capture.UnseenError, match="--moe-backend"):
        seen.bind(runner)
    method.is_monolithic = False
    with pytest.raises(capture.UnseenError, match="--moe-backend"):
        seen.bind(runner)


def test_hello(engine: Engine) -> None:
    engine.run([engine.prompt(8)])
    g = engine.daemon.geometry
    assert g is not None
    assert (g.layers, g.experts, g.top_k, g.block_size, g.hash_algo) == ((0, 1, 2, 3), 32, 4, BLOCK, "sha256")
    assert g.fingerprint > 0


@pytest.mark.parametrize("n", [1, 31, 32, 33, 57])
def test_cold(engine: Engine, n: int) -> None:
    engine.run([engine.prompt(n)])
    assert engine.cached == [0]


def test_prefix_hits(engine: Engine) -> None:
    first = engine.prompt(57)
    engine.run([first])
    engine.run([first])
    assert engine.cached == [32]
    engine.run([first[:50] + engine.prompt(30)])
    assert engine.cached == [32]


def test_aligned_prompt_again(engine: Engine) -> None:
    """A fully cached prompt computes its last block again: the first counts stay."""
    prompt = engine.prompt(64)
    engine.run([prompt])
    engine.run([prompt])
    assert engine.cached == [32]


def test_chunked(engine: Engine) -> None:
    prompt = engine.prompt(333)
    engine.run([prompt])
    engine.run([prompt[:200] + engine.prompt(277)])
    assert engine.cached == [192]


def test_batch(engine: Engine) -> None:
    shared = engine.prompt(170)
    engine.run([engine.prompt(n) for n in (5, 16, 40, 150, 33)] + [shared + engine.prompt(20), shared, shared])


def test_decode_mixed_in(engine: Engine) -> None:
    engine.run([engine.prompt(n) for n in (70, 9, 130, 48, 95, 201)], tokens=12)


def test_preemption(engine: Engine) -> None:
    before = len(engine.preemptions)
    engine.run([engine.prompt(n) for n in (300, 310, 290, 305, 280, 333)], tokens=200)
    assert len(engine.preemptions) > before


def test_nothing_was_lost(engine: Engine) -> None:
    engine.run([engine.prompt(40)])
    assert engine.daemon.seqs == list(range(len(engine.daemon.seqs)))
    assert all(row.sum() == BLOCK * 4 * 4 for row in engine.daemon.rows.values())


@pytest.mark.skipif(os.environ.get("ELDRD_TEST_COMPILE") == "1", reason="this is the compiled run")
def test_compiled() -> None:
    """The same tests where torch.compile traces the routers: only the plugin's early binding makes them seen."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-x", "-m", "vllm"],
        env={**os.environ, "ELDRD_TEST_COMPILE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
