"""A fleet of emulated workers in one process, for tests (EmulatedFleet) and as a command (serve). No router."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadgen.fleet.decode import StepCost
from loadgen.fleet.engine import WorkerSpec
from loadgen.fleet.handoff import Fabric, Violation
from loadgen.fleet.model import ModelSpec, load
from loadgen.fleet.prefill import PrefillCost
from loadgen.fleet.worker import Worker

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """How many workers of each role, named p0.., d0.., v0..; hook: eldrd's ZMQ endpoint, None = no hooks; decode_hook:
    whether decode workers have one too; the rest as in WorkerSpec."""

    prefill: int = 2
    decode: int = 4
    plain: int = 0
    hook: str | None = None
    decode_hook: bool = False
    model: ModelSpec = field(default_factory=ModelSpec)
    kv_blocks: int = 8192
    max_num_seqs: int = 256
    lease_s: float = 30.0
    host: str = "127.0.0.1"
    keepalive_s: float = 5.0
    journal: bool = False
    prefill_cost: PrefillCost = field(default_factory=PrefillCost)
    step_cost: StepCost = field(default_factory=StepCost)


class EmulatedFleet:
    """Workers of a spec on free loopback ports; an async context manager."""

    def __init__(self, spec: FleetSpec | None = None) -> None:
        self.spec = spec or FleetSpec()
        self.model = load(self.spec.model)
        self._fabric = Fabric()
        self.prefill = [self._worker(f"p{i}", "prefill") for i in range(self.spec.prefill)]
        self.decode = [self._worker(f"d{i}", "decode") for i in range(self.spec.decode)]
        self.plain = [self._worker(f"v{i}", "plain") for i in range(self.spec.plain)]

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode, *self.plain]

    @property
    def pinned(self) -> int:
        """Hand-offs whose KV is held on any worker that runs."""
        return sum(w.engine.ledger.pinned for w in self.workers if w.running)

    @property
    def violations(self) -> list[Violation]:
        """Hand-off rules broken so far, in order."""
        return self._fabric.violations

    async def start(self) -> None:
        for w in self.workers:
            await w.start()

    async def stop(self) -> None:
        for w in self.workers:
            await w.stop()

    def describe(self) -> dict[str, Any]:
        """Names and urls by role, and the model's name."""
        roles = {"prefill": self.prefill, "decode": self.decode, "plain": self.plain}
        listed = {role: [{"name": w.name, "url": w.url} for w in workers] for role, workers in roles.items()}
        return {"model": self.spec.model.name, **listed}

    async def __aenter__(self) -> EmulatedFleet:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _worker(self, name: str, role: str) -> Worker:
        spec = WorkerSpec(
            name=name,
            role=role,
            hook=self.spec.hook if role == "prefill" or (role == "decode" and self.spec.decode_hook) else None,
            kv_blocks=self.spec.kv_blocks,
            max_num_seqs=self.spec.max_num_seqs,
            lease_s=self.spec.lease_s,
            host=self.spec.host,
            keepalive_s=self.spec.keepalive_s,
            journal=self.spec.journal,
            prefill=self.spec.prefill_cost,
            decode=self.spec.step_cost,
        )
        return Worker(spec, self.model, self._fabric)


async def serve(spec: FleetSpec) -> None:
    """Run a fleet until SIGTERM or SIGINT; one JSON line on stdout says where its workers are."""
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for s in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(s, end.set)
    async with EmulatedFleet(spec) as fleet:
        sys.stdout.write(json.dumps(fleet.describe()) + "\n")
        sys.stdout.flush()
        await end.wait()
