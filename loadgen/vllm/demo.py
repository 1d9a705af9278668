"""demo-vllm: real vLLM servers behind eldrd: outputs, signatures, capture, fit, reload, and where the domains then go."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen import client, report
from loadgen.vllm import checks
from loadgen.vllm.stack import Stack
from loadgen.vllm.truth import Truth
from loadgen.workloads import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plan:
    """out: where everything goes; requests, rate: of each measured run; prompt_tokens, output_tokens: a request's."""

    out: Path
    requests: int = 200
    rate: float = 5.0
    prompt_tokens: int = 96
    output_tokens: int = 24


def trace(stack: Stack, plan: Plan, seed: int) -> list[Request]:
    """Evenly spaced requests, equally many of each domain in random order, every prompt new."""
    order = np.random.default_rng(seed).permutation(np.arange(plan.requests) % stack.spec.model.domains)
    return [
        Request(
            i / plan.rate,
            domain,
            checks.prompt(stack, plan.prompt_tokens, seed * 10_000 + i, domain),
            plan.output_tokens,
        )
        for i, domain in enumerate(order.tolist())
    ]


async def measure(
    stack: Stack, plan: Plan, seed: int, more: Callable[[Request], Mapping[str, Any]] | None = None
) -> tuple[list[client.Result], float]:
    """Send a trace through eldrd; the results and the domain purity. more: as in client.run."""
    wanted = trace(stack, plan, seed)
    labels = [f"domain-{d}" for d in range(stack.spec.model.domains)]
    results = await client.run(stack.eldrd.url, wanted, model=stack.model, labels=labels, more=more)
    return results, checks.purity([r.domain for r in results], [r.worker for r in results])


async def gather_domains(stack: Stack, plan: Plan) -> tuple[dict[str, list[client.Result]], dict[str, float]]:
    """jsq while capturing, fit, SIGHUP to eldr, and the same shape of traffic again."""
    capture, partition = stack.out / "capture", stack.out / "partitions.safetensors"
    shutil.rmtree(capture, ignore_errors=True)
    runs: dict[str, list[client.Result]] = {}
    pure: dict[str, float] = {}
    await stack.eldrd.reload(decode={"policy": "jsq"}, capture={"dir": str(capture)})
    runs["jsq"], pure["jsq"] = await measure(stack, plan, 1)
    await stack.eldrd.reload(capture={"dir": ""})
    await stack.eldrd.fit(capture, partition)
    await stack.eldrd.reload(decode={"policy": "eldr", "tau": 0.1}, partitions={"file": str(partition)})
    runs["eldr"], pure["eldr"] = await measure(stack, plan, 2)
    return runs, pure


def figures(results: Sequence[client.Result]) -> dict[str, Any]:
    ok = [r for r in results if r.ok]
    ttft, tpot = [r.ttft * 1e3 for r in ok], [r.tpot * 1e3 for r in ok]
    return {
        "ttft_p50_ms": round(client.percentile(ttft, 50), 2),
        "tpot_p50_ms": round(client.percentile(tpot, 50), 3),
        "tpot_p99_ms": round(client.percentile(tpot, 99), 3),
        "requests": len(results),
        "errors": len(results) - len(ok),
    }


async def run(plan: Plan) -> int:
    """Run it all; the exit status: 0 when outputs and signatures are right, every request was answered and eldr gathered
    the domains better than jsq."""
    console = Console()
    begin = time.monotonic()
    console.print("starting four vLLM servers and eldrd (about two minutes)")
    async with Stack(plan.out) as stack:
        started = time.monotonic() - begin
        console.print(f"up after {started:.0f} s; outputs against a plain server")
        outputs = await checks.outputs(stack)
        console.print(
            f"{sum(o.equal for o in outputs)} of {len(outputs)} equal; signatures against the model's routers"
        )
        truth = await asyncio.to_thread(Truth, stack.checkpoint)
        signatures = await checks.signatures(stack, truth)
        exact = sum(s.exact for s in signatures)
        console.print(
            f"{exact} of {len(signatures)} exact; jsq, capture, fit, reload, eldr ({plan.requests} requests each)"
        )
        runs, pure = await gather_domains(stack, plan)
        servers = {
            s.name: {"start_s": round(s.start_seconds, 1), "rss_mb": s.rss_bytes() >> 20} for s in stack.fleet.servers
        }
    policies = {name: figures(results) for name, results in runs.items()}
    inexact = [asdict(s) for s in signatures if not s.exact]
    result = {
        "outputs_equal": all(o.equal for o in outputs),
        "prompts": len(outputs),
        "signatures": {"exact": exact, "total": len(signatures), "inexact": inexact},
        "domain_purity": {name: round(p, 3) for name, p in pure.items()},
        "policies": policies,
        "servers": servers,
        "start_s": round(started, 1),
        "wall_s": round(time.monotonic() - begin, 1),
    }
    report.write_json(result, plan.out / "report.json")
    console.print(_table(policies, pure))
    console.print(f"{plan.out / 'report.json'}", highlight=False)
    right = result["outputs_equal"] and all(s.exact or s.near_tie for s in signatures)
    answered = not any(p["errors"] for p in policies.values())
    return int(not (right and answered and pure["eldr"] > pure["jsq"]))


def _table(policies: dict[str, dict[str, Any]], pure: dict[str, float]) -> Table:
    table = Table("policy", "domain purity", *next(iter(policies.values())), title="real vLLM on this machine")
    for name, row in policies.items():
        table.add_row(name, f"{pure[name]:.2f}", *(str(v) for v in row.values()))
    return table
