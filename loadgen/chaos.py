"""Random requests, random faults and clients that leave, against a real eldrd: at the end every promise is checked.

The fleet and the clients are in this process, eldrd is one of its own. The seed fixes the requests and each worker's
sequence of faults; how they interleave is the machine's. No policy is judged here, only that nothing is wrong, doubled,
mixed up, leaked or left behind.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from loadgen import chaos_requests
from loadgen.chaos_faults import on_decode, on_prefill
from loadgen.chaos_requests import Fate, Wrong
from loadgen.daemon import Daemon, DaemonError
from loadgen.fleet import EmulatedFleet, FleetSpec
from loadgen.fleet.decode import StepCost
from loadgen.fleet.prefill import PrefillCost
from loadgen.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.fleet import Worker

_LEASE_S: Final = 8.0
# Limits that only stalled workers reach, on a busy machine too.
_LIMIT_S: Final = 4.0
_GROWTH_LIMIT: Final = 20 << 20
_PAGE: Final = 4096
_SHOWN: Final = 20
_JOURNAL: Final = 4096
_HUNG_S: Final = 120
# For what must come to rest.
_PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """requests; seed; out: folder for eldrd's configuration and log; parallel: requests under way at once; report_every:
    requests between two progress lines, 0 for none."""

    requests: int
    seed: int
    out: Path
    parallel: int = 64
    report_every: int = 1000


@dataclass(slots=True)
class Report:
    """What a run found. problems: what must not be, one line each; outcomes: how requests ended, as clients saw it;
    handoffs: eldrd's count by outcome; pins: the fleet's; rss: bytes after half of the requests and after all."""

    requests: int
    seed: int
    seconds: float = 0.0
    rate: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    handoffs: dict[str, int] = field(default_factory=dict)
    pins: Counter[str] = field(default_factory=Counter)
    rss: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def json(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


async def run(plan: Plan, say: Callable[[str], None]) -> Report:
    """Run it. Raises DaemonError if eldrd does not start or ends."""
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "eldrd.log").unlink(missing_ok=True)
    hook = f"tcp://127.0.0.1:{free_port()}"
    spec = FleetSpec(
        prefill=3,
        decode=4,
        hook=hook,
        lease_s=_LEASE_S,
        journal=True,
        max_num_seqs=1024,
        prefill_cost=PrefillCost(0.002, 0.00002),
        step_cost=StepCost(0.002, 0.0, 0.0),
    )
    async with EmulatedFleet(spec) as fleet:
        chaos = _Chaos(plan, fleet, hook)
        await chaos.eldrd.start()
        try:
            await chaos.load(say)
            await chaos.judge()
        finally:
            status = await chaos.eldrd.stop()
        if status != 0:
            chaos.report.problems.append(f"eldrd ended with status {status}")
    return chaos.report


class _Chaos:
    """One run."""

    def __init__(self, plan: Plan, fleet: EmulatedFleet, hook: str) -> None:
        self.report = Report(plan.requests, plan.seed)
        self._plan, self._fleet = plan, fleet
        listed = fleet.describe()
        self._decode = listed["decode"]
        self.eldrd = Daemon(plan.out, listed["prefill"], listed["decode"], hook)
        # Signatures are waited for although no policy needs them: that path is to leak nothing either.
        self.eldrd.configure(
            capture={"dir": str((plan.out / "capture").absolute()), "max_bytes": 1 << 20},
            # A small cache, so that its filling up is over before memory is measured.
            signatures={"listen": hook, "wait_ms": 20, "cache_bytes": 1 << 20},
            timeouts={
                **dict.fromkeys(("connect_s", "prefill_s", "first_byte_s", "idle_s"), _LIMIT_S),
                "handoff_s": _LEASE_S - 2.0,
            },
            retries={"attempts": 3},
            health={"interval_s": 0.2, "timeout_s": 10.0, "open_s": 0.1},
        )
        for n, worker in enumerate(fleet.workers):
            rng = random.Random(f"{plan.seed}-{n}")
            worker.draw = (on_prefill if worker in fleet.prefill else on_decode)(rng, self.report.faults)

    async def load(self, say: Callable[[str], None]) -> None:
        """Send the requests while an operator restarts workers and reloads the configuration."""
        began = time.monotonic()
        indices = iter(range(self._plan.requests))
        ended = 0

        async def send(http: aiohttp.ClientSession) -> None:
            nonlocal ended
            for i in indices:
                await self._one(http, i)
                ended += 1
                if ended == self._plan.requests // 2:
                    self.report.rss.append(self._rss())
                if self._plan.report_every and ended % self._plan.report_every == 0:
                    rate = ended / (time.monotonic() - began)
                    say(f"{ended} requests, {rate:.0f}/s, {len(self.report.problems)} problems")

        operator = asyncio.create_task(self._operate())
        # Connections are kept: answers that went to the wrong request would show.
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await asyncio.gather(*(send(http) for _ in range(self._plan.parallel)))
        operator.cancel()
        (problem,) = await asyncio.gather(operator, return_exceptions=True)
        if not isinstance(problem, asyncio.CancelledError):
            raise DaemonError("the operator's task failed") from problem
        self.report.seconds = round(time.monotonic() - began, 2)
        self.report.rate = round(self._plan.requests / self.report.seconds, 1)

    async def _one(self, http: aiohttp.ClientSession, index: int) -> None:
        ask = chaos_requests.make(self._fleet.model, self._plan.seed, index)
        try:
            async with asyncio.timeout(_HUNG_S):
                fate = await chaos_requests.send(http, self.eldrd.url, ask)
                outcome = chaos_requests.check(ask, fate, self._sent(fate))
        except TimeoutError:
            outcome = "hung"
            self.report.problems.append(f"request {index}: no end after {_HUNG_S} s")
        except Wrong as e:
            outcome = "wrong"
            self.report.problems.append(f"request {index} ({ask.describe()}): {e}")
        self.report.outcomes[outcome] += 1

    def _sent(self, fate: Fate) -> bytes | None:
        """What the decode worker of an answer has sent for it; None where no decode worker is named."""
        name = fate.headers.get("x-eldrd-decode")
        worker = next((w for w in self._fleet.decode if w.name == name), None)
        if worker is None or fate.id is None:
            return None
        sent = worker.journal.pop(fate.id, None)
        return None if sent is None else bytes(sent.body)

    async def _operate(self) -> None:
        """Restarts, listeners that close for a while, decode workers taken away and brought back."""
        rng = random.Random(f"{self._plan.seed}-operator")
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5))
            worker = rng.choice(self._fleet.workers)
            act = rng.choice((self._restart, self._refuse, self._reload))
            self.report.faults[f"operator_{act.__name__.strip('_')}"] += 1
            try:
                await act(worker, rng)
            finally:
                for w in self._fleet.workers:
                    # Answers nobody has asked for by now belong to clients that have gone.
                    while len(w.journal) > _JOURNAL:
                        del w.journal[next(iter(w.journal))]

    async def _restart(self, worker: Worker, rng: random.Random) -> None:
        self._retire(worker)
        await worker.stop()
        try:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
        finally:
            await worker.start()

    async def _refuse(self, worker: Worker, rng: random.Random) -> None:
        worker.unlisten()
        try:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
        finally:
            await worker.listen()

    async def _reload(self, worker: Worker, rng: random.Random) -> None:
        rest = [w for w in self._decode if w["name"] != worker.name]
        for workers in (rest, self._decode):
            self.eldrd.configure(decode={"workers": workers})
            self.eldrd.signal(signal.SIGHUP)
            await asyncio.sleep(rng.uniform(0.1, 0.5))

    def _retire(self, worker: Worker) -> None:
        self.report.pins += worker.engine.ledger.ends

    def _rss(self) -> int:
        assert self.eldrd.process is not None
        return int(Path(f"/proc/{self.eldrd.process.pid}/statm").read_text().split()[1]) * _PAGE

    async def judge(self) -> None:
        """What must be true when all clients have gone."""
        problems = self.report.problems
        self.report.rss.append(self._rss())
        for worker in self._fleet.workers:
            worker.draw = None
        await _within(_LEASE_S + _PATIENCE_S, lambda: self._fleet.pinned == 0)
        if self._fleet.pinned:
            problems.append(f"{self._fleet.pinned} hand-offs are pinned after their lease")
        for worker in self._fleet.workers:
            engine = worker.engine
            if not await _within(_PATIENCE_S, lambda e=engine: e.pool.usage == 0):  # type: ignore[misc]
                problems.append(f"{worker.name} holds KV blocks: {engine.pool.usage:.4f} of them")
            self._retire(worker)
        for _ in range(int(_PATIENCE_S / 0.05)):
            gauges = await self._gauges()
            if not any(gauges.values()):
                break
            await asyncio.sleep(0.05)
        problems += [f"gauge {name} is {value:g}, not 0" for name, value in gauges.items() if value]
        for outcome in ("consumed", "released", "expired", "lost"):
            self.report.handoffs[outcome] = int(await self.eldrd.metric("eldrd_handoffs_total", outcome=outcome))
        middle, end = self.report.rss
        if end - middle > _GROWTH_LIMIT:
            problems.append(f"RSS grew by {(end - middle) / 2**20:.1f} MiB in the second half")
        # A hand-off of a restarted engine is unknown to D, and one that P named wrongly as well; the rest is eldrd's doing.
        wrong = [
            v
            for v in self._fleet.violations
            if v.kind != "unknown_engine" and not v.remote_request_id.endswith("-wrong")
        ]
        problems += [f"hand-off rule broken at {v.worker}: {v.kind} ({v.remote_request_id})" for v in wrong[:_SHOWN]]
        await asyncio.sleep(0.2)
        crashes = [line for line in self.eldrd.lines() if line["event"] in ("library", "request_failed")]
        problems += [f"log: {orjson.dumps(line).decode()}" for line in crashes[:_SHOWN]]
        if self.report.outcomes["ok"] < self._plan.requests / 4:
            problems.append(f"only {self.report.outcomes['ok']} requests were served: the run shows little")

    async def _gauges(self) -> dict[str, float]:
        text: str = await self.eldrd.get("/metrics")
        found: dict[str, Any] = {}
        for line in text.splitlines():
            if line.startswith(("eldrd_in_flight{", "eldrd_handoffs_open ", "eldrd_requests_running ")):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found


async def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True
