"""A real eldrd process: its configuration, start, reload, logs, metrics and stop. Sends no request of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from loadgen.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path


# The first start of all compiles: 20 s on two free cores, minutes on busy ones.
_START_S = 300.0


class DaemonError(RuntimeError):
    """eldrd did not do what was waited for; the message ends with its log."""


def toml(sections: Mapping[str, dict[str, Any] | list[dict[str, Any]]]) -> str:
    """A configuration file of these sections; a list is an array of tables. Values are written as JSON, inline tables for
    lists of workers."""

    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{ " + ", ".join(f"{k} = {value(x)}" for k, x in v.items()) + " }"
        if isinstance(v, list | tuple):
            return "[" + ", ".join(value(x) for x in v) + "]"
        return json.dumps(v)

    return "\n".join(
        f"{title}\n" + "\n".join(f"{k} = {value(v)}" for k, v in keys.items()) + "\n"
        for name, section in sections.items()
        for title, keys in (
            [(f"[[{name}]]", table) for table in section] if isinstance(section, list) else [(f"[{name}]", section)]
        )
    )


class Daemon:
    """`python -m eldrd serve` on a free port. sections: the configuration, changed by ``configure``; models: its
    [[models]]."""

    def __init__(
        self, folder: Path, prefill: list[dict[str, str]], decode: list[dict[str, str]], hook: str = ""
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = folder / "eldrd.toml"
        self.log = folder / "eldrd.log"
        self.process: asyncio.subprocess.Process | None = None
        self.models: list[dict[str, Any]] = []
        self.sections: dict[str, dict[str, Any]] = {
            "server": {"listen": f"127.0.0.1:{self.port}"},
            "prefill": {"workers": prefill},
            "decode": {"policy": "jsq", "workers": decode},
            "signatures": {"listen": hook, "wait_ms": 200},
            "health": {"interval_s": 0.3, "timeout_s": 10.0, "open_s": 0.5},
            "drain": {"timeout_s": 50.0},
        }

    def configure(self, **sections: dict[str, Any]) -> None:
        """Change sections of the file; a running daemon looks at it when it is told to reload."""
        for name, keys in sections.items():
            self.sections.setdefault(name, {}).update(keys)
        self.config.write_text(toml({**self.sections, **({"models": self.models} if self.models else {})}))

    async def start(self) -> Daemon:
        """Start the process and wait until a request can be served. Raises DaemonError."""
        self.configure()
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "eldrd", "serve", "--config", str(self.config),
                stderr=log, env={k: v for k, v in os.environ.items() if not k.startswith("ELDRD_")},
            )  # fmt: skip
        try:
            await self.until(self.ready, _START_S)
        except BaseException:
            await self.stop()
            raise
        return self

    async def ready(self) -> bool:
        try:
            async with aiohttp.ClientSession() as s, s.get(self.url + "/ready") as r:
                return r.status == 200
        except aiohttp.ClientError:
            return False

    async def until(self, condition: Callable[[], Awaitable[bool]], timeout_s: float = 120.0) -> None:
        """Wait until ``condition`` holds. Raises DaemonError when it does not in time or the process ended."""
        end = time.monotonic() + timeout_s
        while not await condition():
            if time.monotonic() > end or (self.process is not None and self.process.returncode is not None):
                raise DaemonError(f"waited in vain; {self.log} ends with\n{self.log.read_text()[-4000:]}")
            await asyncio.sleep(0.02)

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as s, s.get(self.url + path) as r:
            return await (r.json() if "json" in r.content_type else r.text())

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in (await self.get("/metrics")).splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    async def reload(self, **sections: dict[str, Any]) -> None:
        """Change the file, SIGHUP, and wait for the verdict."""
        before = await self.metric("eldrd_reloads_total")
        self.configure(**sections)
        self.signal(signal.SIGHUP)

        async def done() -> bool:
            return await self.metric("eldrd_reloads_total") > before

        await self.until(done)

    async def fit(self, capture: Path, out: Path) -> str:
        """`eldrd fit` for this daemon's decode workers; what it printed. Raises DaemonError."""
        workers = ",".join(w["name"] for w in self.sections["decode"]["workers"])
        arguments = ("fit", "--capture", str(capture), "--workers", workers, "--out", str(out))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "eldrd", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        printed, _ = await process.communicate()
        if process.returncode != 0:
            raise DaemonError(f"eldrd fit ended with status {process.returncode}:\n{printed.decode()}")
        return printed.decode()

    def check(self) -> None:
        """Raises DaemonError if the process has ended."""
        if self.process is not None and self.process.returncode is not None:
            raise DaemonError(f"eldrd ended with status {self.process.returncode}; see {self.log}")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """The log so far, of one event or all; without a line that is being written."""
        whole = self.log.read_bytes().rpartition(b"\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    async def logged(self, event: str, n: int = 1) -> list[dict[str, Any]]:
        """The log's lines of one event, once there are n: a thread writes them, a moment after what they tell of."""

        async def written() -> bool:
            return len(self.lines(event)) >= n

        await self.until(written)
        return self.lines(event)

    async def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), 90)
