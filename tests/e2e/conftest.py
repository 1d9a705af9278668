"""Fixtures: an emulated fleet in the test's loop and a real eldrd process in front of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadgen.fleet.decode import StepCost
from loadgen.fleet.emulated import EmulatedFleet, FleetSpec

sys.path.insert(0, str(Path(__file__).parent))

from daemon import Daemon, free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def hook() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
async def fleet(hook: str) -> AsyncIterator[EmulatedFleet]:
    """Two prefill, three decode and one plain worker with fast steps."""
    spec = FleetSpec(prefill=2, decode=3, plain=1, hook=hook, step_cost=StepCost(0.001, 0.0, 0.0))
    async with EmulatedFleet(spec) as fleet:
        yield fleet


@pytest.fixture
async def eldrd(fleet: EmulatedFleet, hook: str, tmp_path: Path) -> AsyncIterator[Daemon]:
    listed = fleet.describe()
    daemon = await Daemon(tmp_path, listed["prefill"], listed["decode"], hook).start()
    yield daemon
    await daemon.stop()
    crashes = [line for line in daemon.lines() if line["event"] in ("library", "request_failed")]
    assert not crashes, crashes
