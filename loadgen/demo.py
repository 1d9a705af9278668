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
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from loadgen import client, report
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
        self, plan: Plan, console: Console, http: aiohttp.ClientSession, fleet: dict[str, Any], fleet_process: _Process
    ) -> None:
        self._plan, self._console, self._http, self._fleet = plan, console, http, fleet
        self._listen = f"127.0.0.1:{_free_port()}"
        self._url = f"http://{self._listen}"
        self._config = plan.out / "eldrd.toml"
        self._hook = fleet["hook"]
        self._processes = [fleet_process]
        self._trace = poisson(Workload(), plan.rate, plan.seconds, _TRACE_SEED)

    @classmethod
    async def start(cls, plan: Plan, console: Console, stack: contextlib.AsyncExitStack) -> _Demo:
        """Start the fleet, then the daemon, and wait until it is ready."""
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        hook = f"tcp://127.0.0.1:{_free_port()}"
        counts = ("--prefill", str(plan.prefill), "--decode", str(plan.decode))
        fleet = await stack.enter_async_context(
            _running("fleet", plan.out, "-m", "loadgen", "fleet", *counts, "--hook", hook)
        )
        assert fleet.process.stdout is not None
        line = await asyncio.wait_for(fleet.process.stdout.readline(), _START_LIMIT_S)
        if not line:
            raise DemoError(f"the fleet did not start; see {fleet.log}")
        demo = cls(plan, console, http, {**json.loads(line), "hook": hook}, fleet)
        demo._write_config("jsq", capture=True)
        console.print("starting eldrd (the first start compiles its kernels)")
        daemon = await stack.enter_async_context(
            _running("eldrd", plan.out, "-m", "eldrd", "serve", "--config", str(demo._config))
        )
        demo._processes.append(daemon)
        await demo._until_ready()
        return demo

    async def calibrate(self) -> None:
        """Capture the signatures of a calibration run and fit partitions to them."""
        trace = poisson(
            _CALIBRATION_WORKLOAD, _CALIBRATION_RATE, self._plan.calibration / _CALIBRATION_RATE, _CALIBRATION_SEED
        )
        results = await self._send("calibration", trace)
        if failed := sum(not r.ok for r in results):
            raise DemoError(f"{failed} of {len(results)} calibration requests failed; see {self._plan.out}")
        # Without capture in the configuration the reload writes out what is buffered.
        self._write_config("jsq", capture=False)
        await self._reload()
        out = self._plan.out
        workers = ",".join(w["name"] for w in self._fleet["decode"])
        fit = (
            "fit",
            "--capture",
            str(out / "capture"),
            "--workers",
            workers,
            "--out",
            str(out / "partitions.safetensors"),
        )
        with (out / "fit.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "eldrd", *fit, stdout=log, stderr=log, env=_environment()
            )
            if await process.wait():
                raise DemoError(f"eldrd fit ended with status {process.returncode}; see {out / 'fit.log'}")

    async def use(self, policy: str) -> None:
        """Switch the daemon to a policy and empty the prefill workers' prefix caches."""
        self._write_config(policy, capture=False)
        await self._reload()
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
            results = await client.run(self._url, trace, model=self._fleet["model"], labels=DOMAINS, started=started)
        finally:
            for t in ticker:
                t.cancel()
            self._console.print()
        for p in self._processes:
            p.check()
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

    def _write_config(self, policy: str, *, capture: bool) -> None:
        def workers(role: str) -> str:
            return ", ".join(f'{{ name = "{w["name"]}", url = "{w["url"]}" }}' for w in self._fleet[role])

        self._config.write_text(
            f'[server]\nlisten = "{self._listen}"\n'
            f"[prefill]\nworkers = [ {workers('prefill')} ]\n"
            f'[decode]\npolicy = "{policy}"\ntau = 0.1\nworkers = [ {workers("decode")} ]\n'
            f'[partitions]\nfile = "{"partitions.safetensors" if policy == "eldr" else ""}"\n'
            f'[signatures]\nlisten = "{self._hook}"\nwait_ms = 50\n'
            f'[capture]\ndir = "{"capture" if capture else ""}"\n'
        )

    async def _reload(self) -> None:
        before = await self._generation()
        self._processes[-1].process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(_START_LIMIT_S):
            while await self._generation() == before:
                self._processes[-1].check()
                await asyncio.sleep(0.1)

    async def _generation(self) -> float:
        async with self._http.get(self._url + "/metrics") as r:
            page = await r.text()
        samples = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}
        return samples["eldrd_config_generation"]

    async def _until_ready(self) -> None:
        async with asyncio.timeout(_START_LIMIT_S):
            while True:
                self._processes[-1].check()
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with self._http.get(self._url + "/ready") as r:
                        if r.status == 200:
                            return
                await asyncio.sleep(0.1)


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


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
