"""prove-vllm: TPOT of the policies on real vLLM with a model whose decode is bound by expert weights, in interleaved rounds.

Two decode servers, each pinned to a processor of its own, and one prefill server. A round sends the same trace under every
policy; the figures are paired by round, so that a machine that drifts does so for all. Greedy outputs are compared too, and
the active experts of a step that the hooks measured stand beside what the prompts' signatures let one expect.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import optimize, stats

from loadgen import client, report
from loadgen.vllm import checks, demo, experts
from loadgen.vllm.model import ModelSpec
from loadgen.vllm.stack import Stack, StackSpec
from loadgen.workloads import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BASELINES = ("random", "round_robin", "jsq", "p2c")
OURS = ("eldr", "union")
# 2.3 GB in bfloat16: one expert is 9.4 MB, a step of a mixed batch reads most of them.
MODEL = ModelSpec(layers=2, hidden=2048, experts=128, topk=8, intermediate=768)
_EXPERTS = {
    "experts": "active_experts",
    "predicted": "active_experts_predicted",
    "live gauge": "active_experts_expected_live",
    "batch": "step_requests",
}
_WIDTH = 132
# Requests in the largest batch that the step time is measured with.
_BATCH = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: each sends ``requests`` at ``rate`` a second under every policy."""

    out: Path
    rounds: int = 6
    requests: int = 48
    rate: float = 3.0
    prompt_tokens: int = 16
    output_tokens: int = 128
    calibration: int = 64

    def traffic(self, requests: int, output_tokens: int) -> demo.Plan:
        return demo.Plan(self.out, requests, self.rate, self.prompt_tokens, output_tokens)


async def run(plan: Plan) -> int:
    """Run all rounds; exit status 0 if every request was answered and outputs were equal under all policies."""
    console = Console(width=max(_WIDTH, Console().width))
    begin = time.monotonic()
    spec = StackSpec(model=MODEL, dtype="bfloat16", plain=False, extra=("--stream-interval", "8"))
    async with Stack(plan.out, spec) as stack:
        pin(stack)
        console.print(f"up after {time.monotonic() - begin:.0f} s; calibration")
        await calibrate(stack, plan)
        costs = await step_time(stack, plan)
        console.print(f"a step here: {costs}", highlight=False)
        runs: dict[str, list[list[client.Result]]] = {p: [] for p in (*BASELINES, *OURS)}
        pure: dict[str, list[float]] = {p: [] for p in runs}
        steps: dict[str, list[experts.Steps]] = {p: [] for p in runs}
        predicted: dict[str, list[float]] = {p: [] for p in runs}
        digests = {policy: await outputs(stack, policy, costs) for policy in ("jsq", *OURS)}
        for i in range(plan.rounds):
            traffic = plan.traffic(plan.requests, plan.output_tokens)
            counts = await experts.signatures(stack, demo.trace(stack, traffic, 100 + i), stack.out / "capture-round")
            # Another order each round, so that nobody always follows the same neighbour.
            for policy in np.random.default_rng(i).permutation(list(runs)).tolist():
                await use(stack, policy, costs)
                async with experts.Watch(stack) as watch:
                    results, purity = await demo.measure(stack, traffic, 100 + i, sampled(stack))
                runs[policy].append(results)
                pure[policy].append(purity)
                steps[policy].append(watch.result)
                predicted[policy].append(experts.expected(results, counts, MODEL.topk))
                console.print(
                    f"round {i + 1}: {policy:13} TPOT P50 {median_tpot(results):7.2f} ms, purity {purity:.2f}, "
                    f"active experts {watch.result.active:6.2f}, predicted {predicted[policy][-1]:6.2f}",
                    highlight=False,
                )
    result = figures(runs, pure)
    for policy, row in result["policies"].items():
        row |= experts.summary(steps[policy], predicted[policy])
    result |= {
        "outputs_equal": len(set(digests.values())) == 1,
        "step_time": costs,
        "wall_s": round(time.monotonic() - begin, 1),
    }
    report.write_json(result, plan.out / "report.json")
    console.print(_table(result))
    console.print(f"{plan.out / 'report.json'}", highlight=False)
    failed = sum(not r.ok for rounds in runs.values() for results in rounds for r in results)
    return int(bool(failed) or not result["outputs_equal"])


def pin(stack: Stack) -> None:
    """Each decode server on a processor of its own, as far as there are."""
    processors = sorted(os.sched_getaffinity(0))
    for i, server in enumerate(stack.fleet.decode):
        for pid in server.pids():
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {processors[i % len(processors)]})


def sampled(stack: Stack) -> Callable[[Request], dict[str, Any]]:
    """Fields that have a request's output drawn from its domain's tokens, by its own seed. Greedy output of a model that was
    never trained soon repeats a few tokens that are everybody's."""
    allowed = [list(stack.spec.model.domain_tokens(d)) for d in range(stack.spec.model.domains)]

    def fields(request: Request) -> dict[str, Any]:
        return {
            "temperature": 1.0,
            "seed": zlib.crc32(repr(request.prompt).encode()),
            "allowed_token_ids": allowed[request.domain],
        }

    return fields


async def calibrate(stack: Stack, plan: Plan) -> None:
    """Capture, and fit a partition of the decode servers."""
    capture = stack.out / "capture"
    await stack.eldrd.reload(capture={"dir": str(capture)})
    await demo.measure(stack, plan.traffic(plan.calibration, 4), 1)
    await stack.eldrd.reload(capture={"dir": ""})
    await stack.eldrd.fit(capture, stack.out / "partitions.safetensors")


async def step_time(stack: Stack, plan: Plan) -> dict[str, float]:
    """What a decode step costs here, as the settings of [union]: milliseconds of an empty one, of one more active expert and
    of one more request, by least squares over batches on one decode server alone. Equal prompts decode equal tokens, so that
    a batch of them reads the experts of one."""
    url = stack.fleet.decode[0].url
    domains = stack.spec.model.domains
    prompts = [checks.prompt(stack, plan.prompt_tokens, 5_000 + i, i % domains) for i in range(_BATCH)]
    batches = ([0], [0] * (_BATCH // 2), [0] * _BATCH, range(0, _BATCH, 2), range(_BATCH))
    rows, times = [], []
    for batch in batches:
        wanted = [Request(0.0, i % domains, prompts[i], 48) for i in batch]
        # The first time fills the prefix cache.
        await client.run(url, wanted, model=stack.model, more=sampled(stack))
        async with experts.Watch(stack) as watch:
            results = await client.run(url, wanted, model=stack.model, more=sampled(stack))
        rows.append((1.0, watch.result.active, watch.result.requests))
        times.append(median_tpot(results))
    found, _ = optimize.nnls(np.array(rows), np.array(times))
    return dict(zip(("base_ms", "expert_ms", "request_ms"), found.round(3).tolist(), strict=True))


async def use(stack: Stack, policy: str, steps: dict[str, float]) -> None:
    files = {"file": str(stack.out / "partitions.safetensors")}
    await stack.eldrd.reload(decode={"policy": policy}, partitions=files, union=steps)


async def outputs(stack: Stack, policy: str, steps: dict[str, float]) -> str:
    """A digest of greedy outputs, one after another, under a policy."""
    await use(stack, policy, steps)
    digest = hashlib.sha256()
    async with stack.client(stack.eldrd.url) as through:
        for i in range(6):
            prompt = checks.prompt(stack, 24, 900 + i, i % stack.spec.model.domains)
            digest.update(str(await checks.generate(through, stack.model, prompt, chat=False, stream=False)).encode())
    return digest.hexdigest()


def median_tpot(results: Sequence[client.Result]) -> float:
    return client.percentile([r.tpot * 1e3 for r in results if r.ok], 50)


def figures(runs: dict[str, list[list[client.Result]]], pure: dict[str, list[float]]) -> dict[str, Any]:
    """Per policy: TPOT by round and over rounds, and against the best load balancer: the one of BASELINES whose TPOT is the
    lowest over all rounds. Ratios are paired by round; the 95 % interval is Student's, of their logarithms. Against the
    luckiest of each round, which is another one every time, stands beside it."""
    by_round = {policy: np.array([median_tpot(r) for r in rounds]) for policy, rounds in runs.items()}
    best = min(BASELINES, key=lambda p: float(np.log(by_round[p]).mean()))
    luckiest = np.min([by_round[p] for p in BASELINES], axis=0)
    policies = {}
    for policy, rounds in runs.items():
        ratio = np.log(by_round[policy] / by_round[best])
        interval: list[float | None] = [None, None]
        if len(ratio) > 1 and np.ptp(ratio) > 0:
            low, high = stats.t.interval(0.95, len(ratio) - 1, ratio.mean(), stats.sem(ratio))
            interval = [round(float(np.expm1(low)), 4), round(float(np.expm1(high)), 4)]
        everything = [r.tpot * 1e3 for results in rounds for r in results if r.ok]
        policies[policy] = {
            "tpot_p50_ms": round(float(np.median(by_round[policy])), 2),
            "tpot_p50_ms_by_round": by_round[policy].round(2).tolist(),
            "tpot_p99_ms": round(client.percentile(everything, 99), 2),
            "against_best_baseline": round(float(np.expm1(ratio.mean())), 4),
            "interval_95": interval,
            "against_luckiest_baseline": round(float(np.expm1(np.log(by_round[policy] / luckiest).mean())), 4),
            "domain_purity": round(float(np.mean(pure[policy])), 3),
            "errors": sum(not r.ok for results in rounds for r in results),
        }
    return {"rounds": len(luckiest), "best_baseline": best, "policies": policies}


def _table(result: dict[str, Any]) -> Table:
    times = ("TPOT P50", "P99", "to best LB", "95 %", "purity")
    table = Table("policy", *times, *_EXPERTS, "errors", title=f"real vLLM, {result['rounds']} rounds; milliseconds")
    table.caption = (
        f"LB: {result['best_baseline']}, paired by round; experts: of a step, mean a layer, by the hooks; "
        "batch: requests a step"
    )
    for i, column in enumerate(table.columns):
        column.justify, column.no_wrap = "right" if i else "left", True
    for policy, row in result["policies"].items():
        low, high = row["interval_95"]
        table.add_row(
            policy,
            f"{row['tpot_p50_ms']:.2f}",
            f"{row['tpot_p99_ms']:.2f}",
            f"{row['against_best_baseline']:+.1%}",
            "-" if low is None else f"{low:+.1%} .. {high:+.1%}",
            f"{row['domain_purity']:.2f}",
            *("-" if row[key] is None else f"{row[key]:.2f}" for key in _EXPERTS.values()),
            str(row["errors"]),
        )
    return table
