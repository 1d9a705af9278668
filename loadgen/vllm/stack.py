"""Real vLLM servers with the hook and NIXL, a plain one to compare with, and eldrd in front; as processes, one context.

Sends no request of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import openai

from loadgen.daemon import Daemon
from loadgen.ports import free_port
from loadgen.vllm.fleet import ServerSettings, VllmFleet
from loadgen.vllm.model import ModelSpec, make_model

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self


@dataclass(frozen=True, slots=True)
class StackSpec:
    """What to start. A prompt longer than max_num_batched_tokens is prefilled in chunks. signature_wait_ms: how long eldrd
    waits for a signature."""

    model: ModelSpec = field(default_factory=ModelSpec)
    prefill: int = 1
    decode: int = 2
    max_num_batched_tokens: int = 2048
    lease_seconds: int = 30
    dtype: str = "float32"
    plain: bool = True
    signature_wait_ms: float = 200.0
    extra: tuple[str, ...] = ()


class Stack:
    """The running processes. out: checkpoint, logs, configuration and what eldrd writes."""

    def __init__(self, out: Path, spec: StackSpec | None = None) -> None:
        self.spec = spec or StackSpec()
        self.out = out = out.resolve()
        self.checkpoint = out / "model"
        hook = f"tcp://127.0.0.1:{free_port()}"
        settings = ServerSettings(
            self.checkpoint,
            dtype=self.spec.dtype,
            max_num_batched_tokens=self.spec.max_num_batched_tokens,
            lease_seconds=self.spec.lease_seconds,
            extra=self.spec.extra,
        )
        self.model = settings.served_name
        self.fleet = VllmFleet(
            settings, out, endpoints=[hook], prefill=self.spec.prefill, decode=self.spec.decode, plain=self.spec.plain
        )
        prefill = [{"name": s.name, "url": s.url, "kv_events": s.kv_events} for s in self.fleet.prefill]
        decode = [{"name": s.name, "url": s.url} for s in self.fleet.decode]
        self.eldrd = Daemon(out, prefill, decode, hook)
        self.eldrd.sections["signatures"]["wait_ms"] = self.spec.signature_wait_ms
        self.eldrd.sections["health"]["timeout_s"] = 10.0

    @property
    def plain_url(self) -> str:
        assert self.fleet.plain is not None
        return self.fleet.plain.url

    @property
    def hooks(self) -> int:
        """Servers with a hook: all but the plain one."""
        return self.spec.prefill + self.spec.decode

    def client(self, url: str) -> openai.AsyncOpenAI:
        """The official client for eldrd's or a server's URL."""
        return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600)

    async def start(self) -> Self:
        """Make the checkpoint and start everything; on failure nothing is left running."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.eldrd.log.unlink(missing_ok=True)
        await asyncio.to_thread(make_model, self.checkpoint, self.spec.model)
        await asyncio.to_thread(self.fleet.start)
        try:
            await self.eldrd.start()

            async def hooked() -> bool:
                return len((await self.eldrd.get("/admin/status"))["hooks"]) == self.hooks

            await self.eldrd.until(hooked)
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        try:
            if self.eldrd.process is not None:
                await self.eldrd.stop()
        finally:
            await asyncio.to_thread(self.fleet.stop)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
