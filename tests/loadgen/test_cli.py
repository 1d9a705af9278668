"""`python -m loadgen fleet` as a process."""

from __future__ import annotations

import asyncio
import json
import sys


async def test_fleet_says_where_it_is_and_ends_on_sigterm(http):
    arguments = ("-m", "loadgen", "fleet", "--prefill", "0", "--decode", "2", "--plain", "1")
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        fleet = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        assert [w["name"] for w in fleet["decode"]] == ["d0", "d1"]
        assert fleet["prefill"] == []
        async with http.get(fleet["plain"][0]["url"] + "/v1/models") as r:
            assert (await r.json())["data"][0]["id"] == fleet["model"]
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
