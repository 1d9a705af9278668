"""Fixtures: an emulated fleet in the test's loop and a real eldrd process in front of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
import pytest_asyncio

from loadgen.fleet.decode import StepCost
from loadgen.fleet.emulated import EmulatedFleet, FleetSpec
from loadgen.fleet.prefill import PrefillCost

sys.path.insert(0, str(Path(__file__).parent))

from daemon import Daemon, free_port
from stage import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def hook() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
async def fleet(hook: str) -> AsyncIterator[EmulatedFleet]:
    """Two prefill, three decode and one plain worker with fast steps."""
    spec = FleetSpec(prefill=2, decode=3, plain=1, hook=hook, journal=True, step_cost=StepCost(0.001, 0.0, 0.0))
    async with EmulatedFleet(spec) as fleet:
        yield fleet


@pytest.fixture
async def eldrd(fleet: EmulatedFleet, hook: str, tmp_path: Path) -> AsyncIterator[Daemon]:
    listed = fleet.describe()
    daemon = Daemon(tmp_path, listed["prefill"], listed["decode"], hook)
    # A busy machine's hooks may take long; every signature comes.
    daemon.sections["signatures"]["wait_ms"] = 10_000
    await daemon.start()
    yield daemon
    await daemon.stop()
    crashes = [line for line in daemon.lines() if line["event"] in ("library", "request_failed")]
    assert not crashes, crashes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Two prefill and three decode workers without hooks, leases of 6 s, and eldrd with short limits."""
    spec = FleetSpec(
        prefill=2,
        decode=3,
        lease_s=6.0,
        journal=True,
        step_cost=StepCost(0.001, 0.0, 0.0),
        prefill_cost=PrefillCost(0.001, 0.00008),
        max_num_seqs=4096,
    )
    async with EmulatedFleet(spec) as fleet:
        listed = fleet.describe()
        folder = tmp_path_factory.mktemp("stage")
        daemon = Daemon(folder, listed["prefill"], listed["decode"], f"ipc://{folder}/hook")
        daemon.sections["health"] = {"interval_s": 0.2, "timeout_s": 10.0, "open_s": 0.2}
        daemon.sections["timeouts"] = {
            "connect_s": 2.0, "prefill_s": 10.0, "first_byte_s": 10.0, "idle_s": 10.0, "handoff_s": 5.0
        }  # fmt: skip
        await daemon.start()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as http:
            yield Stage(fleet, daemon, http)
        assert await daemon.stop() == 0


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared_stage: Stage) -> AsyncIterator[Stage]:
    """The file's stage with nothing left of the last test; afterwards everything has come back to zero, no hand-off was
    misused and eldrd has no exception to tell of."""
    await shared_stage.clean()
    before = len(shared_stage.eldrd.lines())
    yield shared_stage
    violations = list(shared_stage.fleet.violations)
    await shared_stage.clean()
    crashes = [line for line in shared_stage.eldrd.lines()[before:] if line["event"] in ("library", "request_failed")]
    assert not crashes, crashes
    assert not violations, violations
