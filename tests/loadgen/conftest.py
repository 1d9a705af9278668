"""A small, fast emulated fleet and a way to talk to it."""

from __future__ import annotations

import aiohttp
import pytest
import pytest_asyncio

from loadgen.fleet import EmulatedFleet, FleetSpec, ModelSpec
from loadgen.fleet.decode import StepCost
from loadgen.fleet.prefill import PrefillCost

SMALL = ModelSpec(vocab=2048, layers=2, experts=16, top_k=2, max_model_len=2048)
FAST = FleetSpec(
    prefill=1,
    decode=2,
    plain=1,
    model=SMALL,
    prefill_cost=PrefillCost(0.001, 0.0),
    step_cost=StepCost(0.001, 0.0, 0.0),
    lease_s=30.0,
)


@pytest.fixture(scope="session")
def small() -> ModelSpec:
    return SMALL


@pytest.fixture(scope="session")
def fast() -> FleetSpec:
    return FAST


@pytest_asyncio.fixture
async def fleet():
    async with EmulatedFleet(FAST) as fleet:
        yield fleet


@pytest_asyncio.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session
