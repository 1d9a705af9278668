"""Open-loop client: sends a trace's requests at their times, streams the answers and measures. Keeps no prompt and no
answer; judges nothing.

Open loop means that a slow server does not slow the arrivals down: a request is sent when the trace says so, however
many are still running.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadgen.workloads import Request

_END = b"\n\n"
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_USAGE = b'"choices":[]'


@dataclass(slots=True)
class Result:
    """One request's outcome. outcome: ``ok``, ``http_<status>``, ``error_event``, ``truncated`` (no [DONE]),
    ``broken`` (connection error) or ``timeout``; times in seconds: late (how long after its time it was sent), ttft,
    gaps between tokens (0 for tokens that came in one read); tokens as the server counts them; worker: the
    x-eldrd-decode header, empty if there is none."""

    at: float
    domain: int
    outcome: str = "broken"
    late: float = 0.0
    ttft: float = float("nan")
    tpot: float = float("nan")
    tokens: int = 0
    worker: str = ""
    gaps: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


class Progress:
    """Counters that change while a trace runs."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.sent = self.ended = self.failed = 0


async def run(
    url: str,
    trace: Sequence[Request],
    *,
    model: str | None = None,
    labels: Sequence[str] = (),
    timeout_s: float = 120.0,
    started: Callable[[Progress], None] | None = None,
    more: Callable[[Request], Mapping[str, Any]] | None = None,
) -> list[Result]:
    """Send ``trace`` to ``url``/v1/completions; results in trace order, when the last has ended.

    labels: name of each domain, sent as x-eldrd-label. started is called once with the live counters.
    more: further fields of a request's body.
    """
    progress = Progress(len(trace))
    if started is not None:
        started(progress)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        begin = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_one(session, r, begin, model, labels, progress, more)) for r in trace]
    return [t.result() for t in running]


async def _one(
    session: aiohttp.ClientSession,
    request: Request,
    begin: float,
    model: str | None,
    labels: Sequence[str],
    progress: Progress,
    more: Callable[[Request], Mapping[str, Any]] | None,
) -> Result:
    loop = asyncio.get_running_loop()
    result = Result(request.at, request.domain)
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        body["model"] = model
    if more is not None:
        body |= more(request)
    headers = {"Content-Type": "application/json"}
    if labels:
        headers["X-Eldrd-Label"] = labels[request.domain]
    data = orjson.dumps(body)
    await asyncio.sleep(begin + request.at - loop.time())
    sent = loop.time()
    result.late = sent - begin - request.at
    progress.sent += 1
    try:
        async with session.post("/v1/completions", data=data, headers=headers) as response:
            result.worker = response.headers.get("x-eldrd-decode", "")
            if response.status == 200:
                await _read(response, sent, result)
            else:
                result.outcome = f"http_{response.status}"
    except TimeoutError:
        result.outcome = "timeout"
    except aiohttp.ClientError:
        result.outcome = "broken"
    progress.ended += 1
    progress.failed += not result.ok
    return result


async def _read(response: aiohttp.ClientResponse, sent: float, result: Result) -> None:
    now = asyncio.get_running_loop().time
    first = last = 0.0
    events, rest, outcome = 0, b"", "truncated"
    async for data in response.content.iter_any():
        *whole, rest = (rest + data).split(_END)
        at = now()
        for event in whole:
            if event.startswith(_DONE):
                outcome = "ok" if outcome == "truncated" else outcome
            elif event.startswith(_ERROR):
                outcome = "error_event"
            elif _USAGE in event:
                result.tokens = orjson.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens"]
            else:
                if events:
                    result.gaps.append(at - last)
                else:
                    first = at
                last, events = at, events + 1
    result.outcome = outcome
    result.tokens = result.tokens or events
    if events:
        result.ttft = first - sent
    if result.tokens > 1:
        result.tpot = (last - first) / (result.tokens - 1)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile of the finite values, nan if there are none."""
    finite = np.array([v for v in values if np.isfinite(v)])
    return float(np.percentile(finite, q)) if len(finite) else float("nan")
