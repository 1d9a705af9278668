"""Chaos in small: 2,000 random requests with faults and disconnects; every check of the run holds."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


async def test_two_thousand_requests_in_chaos(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "chaos", "--requests", "2000", "--seed", "20260",
        "--out", str(tmp_path / "out"), "--json", str(report), "--report-every", "0",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(900):
        _, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(report.read_bytes())
    assert found["problems"] == []
    assert sum(found["outcomes"].values()) == 2000
    assert found["handoffs"]["consumed"] > 500
