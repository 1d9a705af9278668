"""The demo: the real daemon between an emulated fleet and an open-loop client, once with jsq, once with eldr.

Everything runs as processes of its own on loopback: `python -m loadgen fleet`, `python -m eldrd serve` and this one as
the client. Both policies get the same trace, the same fleet and the same warm-up; the prefill workers' prefix caches
are emptied in between. Partitions are fitted from a calibration run with another seed. What the demo cannot influence
is how fast a batch decodes: that is loadgen.fleet.decode's step time over loadgen.fleet.model's experts, calibrated to
the figures of the ELDR paper (see both docstrings).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console

from loadgen import client, report
from loadgen.daemon import Daemon
from loadgen.ports import free_port
from loadgen.workloads import DOMAINS, Request, Workload, poisson

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_CALIBRATION_SEED, _TRACE_SEED = 1, 2
_CALIBRATION_RATE = 25.0
_CALIBRATION_WORKLOAD = Workload(output_median=6, output_sigma=0.3, output_clip=(4, 8))
_START_LIMIT_S = 90.0
_NO_STEP = 2**31


class DemoError(RuntimeError):
    """The demo could not be run; the message says which part failed and where its log is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """out: where logs, plot and report go; seconds, rate: length and requests a second of each measured run; warm_up:
    seconds at its begin that are not measured; calibration: requests."""

    out: Path
    seconds: float = 40.0
    rate: float = 20.0
    warm_up: float = 6.0
    calibration: int = 200
    prefill: int = 2
    decode: int = 4


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    process: asyncio.subprocess.Process
    log: Path

    def check(self) -> None:
        if self.process.returncode is not None:
            raise DemoError(f"{self.name} ended with status {self.process.returncode}; see {self.log}")


async def run(plan: Plan) -> int:
    """Run the demo; returns the exit status: 0, or 1 if any request failed or any hand-off was misused."""
    console = Console()
    begin = time.monotonic()
    _prepare(plan.out)
    async with contextlib.AsyncExitStack() as stack:
        demo = await _Demo.start(plan, console, stack)
        await demo.calibrate()
        runs = {}
        for policy in ("jsq", "eldr"):
            await demo.use(policy)
            runs[policy] = await demo.measure(policy)
        misuse = await demo.misuse()
    figures = {name: r.figures() for name, r in runs.items()}
    changes = {
        f"{short}_change": report.change(figures, key, "eldr", "jsq")
        for short, key in (
            ("active_experts", "active_experts"),
            ("tpot_p50", "tpot_p50_ms"),
            ("tpot_p99", "tpot_p99_ms"),
        )
    }
    report.write_json(
        {
            "policies": figures,
            **changes,
            "rate": plan.rate,
            "seconds": plan.seconds,
            "hand_off_misuse": misuse,
            "wall_s": round(time.monotonic() - begin, 1),
        },
        plan.out / "report.json",
    )
    report.plot(runs, plan.out / "demo.png")
    console.print(report.table(figures))
    console.print(f"{plan.out / 'report.json'}, {plan.out / 'demo.png'}", highlight=False)
    failed = sum(f["errors"] for f in figures.values())
    if failed or misuse:
        console.print(f"[red]{failed} requests failed, {misuse} hand-offs were misused; see {plan.out}/*.log[/red]")
    return int(bool(failed or misuse))


class _Demo:
    """The running processes and what can be asked of them."""

    def __init__(
        self,
        plan: Plan,
        console: Console,
        http: aiohttp.ClientSession,
        fleet: dict[str, Any],
        process: _Process,
        eldrd: Daemon,
    ) -> None:
        self._plan, self._console, self._http, self._fleet = plan, console, http, fleet
        self._process = process
        self._eldrd = eldrd
        self._trace = poisson(Workload(), plan.rate, plan.seconds, _TRACE_SEED)

    @classmethod
    async def start(cls, plan: Plan, console: Console, stack: contextlib.AsyncExitStack) -> _Demo:
        """Start the fleet, then the daemon, and wait until it is ready."""
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        hook = f"tcp://127.0.0.1:{free_port()}"
        counts = ("--prefill", str(plan.prefill), "--decode", str(plan.decode))
        process = await stack.enter_async_context(
            _running("fleet", plan.out, "-m", "loadgen", "fleet", *counts, "--hook", hook)
        )
        assert process.process.stdout is not None
        line = await asyncio.wait_for(process.process.stdout.readline(), _START_LIMIT_S)
        if not line:
            raise DemoError(f"the fleet did not start; see {process.log}")
        fleet = json.loads(line)
        console.print("starting eldrd (the first start compiles its kernels)")
        eldrd = Daemon(plan.out, fleet["prefill"], fleet["decode"], hook)
        eldrd.configure(signatures={"wait_ms": 50}, capture={"dir": str(plan.out / "capture")})
        await eldrd.start()
        stack.push_async_callback(eldrd.stop)
        return cls(plan, console, http, fleet, process, eldrd)

    async def calibrate(self) -> None:
        """Capture the signatures of a calibration run and fit partitions to them."""
        trace = poisson(
            _CALIBRATION_WORKLOAD, _CALIBRATION_RATE, self._plan.calibration / _CALIBRATION_RATE, _CALIBRATION_SEED
        )
        results = await self._send("calibration", trace)
        if failed := sum(not r.ok for r in results):
            raise DemoError(f"{failed} of {len(results)} calibration requests failed; see {self._plan.out}")
        # Without capture in the configuration the reload writes out what is buffered.
        await self._eldrd.reload(capture={"dir": ""})
        out = self._plan.out
        printed = await self._eldrd.fit(out / "capture", out / "partitions.safetensors")
        (out / "fit.log").write_text(printed)

    async def use(self, policy: str) -> None:
        """Switch the daemon to a policy and empty the prefill workers' prefix caches."""
        partitions = {"file": str(self._plan.out / "partitions.safetensors")}
        await self._eldrd.reload(decode={"policy": policy}, partitions=partitions)
        for w in self._fleet["prefill"]:
            async with self._http.post(w["url"] + "/reset_prefix_cache") as r:
                r.raise_for_status()

    async def measure(self, policy: str) -> report.Run:
        """Send the trace; the window runs from the end of the warm-up to the end of the arrivals."""
        sending = asyncio.create_task(self._send(policy, self._trace))
        await asyncio.sleep(self._plan.warm_up)
        first = [await self._steps(w["url"], _NO_STEP) for w in self._fleet["decode"]]
        await asyncio.sleep(self._plan.seconds - self._plan.warm_up)
        steps = []
        for w, (since, _) in zip(self._fleet["decode"], first, strict=True):
            steps += (await self._steps(w["url"], since))[1]
        results = await sending
        return report.Run(results, [r for r in results if r.at >= self._plan.warm_up], steps)

    async def misuse(self) -> int:
        """Hand-off rules broken, and prompts that decode workers had to prefill themselves."""
        n = 0
        for w in self._fleet["decode"]:
            async with self._http.get(w["url"] + "/emulated/stats", params={"since": _NO_STEP}) as r:
                stats = await r.json()
            n += len(stats["violations"]) + stats["local_prefills"]
        return n

    async def _steps(self, url: str, since: int) -> tuple[int, list[tuple[int, float]]]:
        async with self._http.get(url + "/emulated/stats", params={"since": since}) as r:
            stats = await r.json()
        return stats["next_step"], [(b, a) for b, a in stats["steps"]]

    async def _send(self, name: str, trace: list[Request]) -> list[client.Result]:
        ticker: list[asyncio.Task[None]] = []

        def started(progress: client.Progress) -> None:
            ticker.append(asyncio.create_task(self._tick(name, progress)))

        try:
            results = await client.run(
                self._eldrd.url, trace, model=self._fleet["model"], labels=DOMAINS, started=started
            )
        finally:
            for t in ticker:
                t.cancel()
            self._console.print()
        self._process.check()
        self._eldrd.check()
        return results

    async def _tick(self, name: str, progress: client.Progress) -> None:
        terminal = self._console.is_terminal
        while True:
            self._console.print(
                f"{name}: {progress.sent} of {progress.total} requests sent, {progress.sent - progress.ended} running, "
                f"{progress.failed} failed   ",
                end="\r" if terminal else "\n",
                highlight=False,
            )
            await asyncio.sleep(0.5 if terminal else 10)


@contextlib.asynccontextmanager
async def _running(name: str, out: Path, *arguments: str) -> AsyncIterator[_Process]:
    """A Python process of its own, ended by SIGTERM and, if that does not help, SIGKILL."""
    path = out / f"{name}.log"
    with path.open("wb") as log:
        stdout = asyncio.subprocess.PIPE if name == "fleet" else log
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=stdout, stderr=log, env=_environment()
        )
    try:
        yield _Process(name, process, path)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 15)
            except TimeoutError:
                process.kill()
                await process.wait()


def _prepare(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "capture", ignore_errors=True)
    for name in ("partitions.safetensors", "report.json", "demo.png"):
        (out / name).unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    """Ours without settings of eldrd, which would override the demo's configuration."""
    return {k: v for k, v in os.environ.items() if not k.startswith("ELDRD_")}
