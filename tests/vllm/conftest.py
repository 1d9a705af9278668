"""One stack of real servers for all tests that go through eldrd: prefill, two decode, a plain one, and the daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from loadgen.vllm.stack import Stack, StackSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """TEST_VLLM_OUT keeps the servers' logs in a folder of one's choice. Signatures are waited for as long as a busy
    machine may need."""
    out = os.environ.get("TEST_VLLM_OUT")
    spec = StackSpec(signature_wait_ms=10_000)
    async with Stack(Path(out) if out else tmp_path_factory.mktemp("stack"), spec) as stack:
        yield stack
