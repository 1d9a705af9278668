"""Random requests at a running eldrd: never a 500, never a crash, never a smuggled hand-off, and it goes on serving."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadgen.daemon import Daemon
from loadgen.fleet import EmulatedFleet, FleetSpec
from loadgen.fleet.decode import StepCost
from loadgen.fleet.prefill import PrefillCost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOOD = b'{"model":"emulated-moe","prompt":"a b c","max_tokens":2}'
MARK = "zzmark"
unhurried = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class Target:
    """An eldrd with one worker of each role."""

    def __init__(self, fleet: EmulatedFleet, eldrd: Daemon) -> None:
        self.fleet, self.eldrd = fleet, eldrd

    async def talk(self, *parts: bytes, patience_s: float = 60.0) -> bytes:
        """Send these parts and take what comes until the connection is closed, by us if there is silence for so long."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.eldrd.port)
        got = b""
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            while True:
                data = await asyncio.wait_for(reader.read(65536), patience_s)
                if not data:
                    break
                got += data
        except (ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()
        return got

    async def serves(self) -> None:
        answer = await self.talk(post("/v1/completions", GOOD))
        assert answer.startswith(b"HTTP/1.1 200 "), answer


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: a", b"Content-Length: %d" % len(body), b"Connection: close"]
    return b"\r\n".join([*lines, *headers, b"", body])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    spec = FleetSpec(
        prefill=1,
        decode=1,
        journal=True,
        step_cost=StepCost(0.0005, 0, 0),
        prefill_cost=PrefillCost(0.0005, 0),
        lease_s=30,
    )
    async with EmulatedFleet(spec) as fleet:
        listed = fleet.describe()
        eldrd = await Daemon(tmp_path_factory.mktemp("fuzz"), listed["prefill"], listed["decode"]).start()
        target = Target(fleet, eldrd)
        yield target
        await target.serves()
        for gauge in ("eldrd_in_flight", "eldrd_handoffs_open", "eldrd_requests_running"):

            async def zero(name: str = gauge) -> bool:
                return await eldrd.metric(name) == 0

            await eldrd.until(zero)
        assert await eldrd.metric("eldrd_requests_total", status="500") == 0
        assert await eldrd.stop() == 0
        crashes = [line for line in eldrd.lines() if line["event"] in ("library", "request_failed")]
        assert crashes == []
        assert MARK not in eldrd.log.read_text()
        assert fleet.violations == []


def judged(answer: bytes) -> None:
    """Each answer in these bytes has a status that a client's mistake may have, or is a good one's."""
    statuses = [int(s) for s in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]
    assert not {s for s in statuses if s >= 500}, answer[:400]
    if statuses and statuses[0] >= 400 and b"Content-Type: application/json" in answer:
        assert set(orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


pieces = st.one_of(
    st.sampled_from(
        [
            b"GET ", b"POST ", b"OPTIONS ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"/v1/completions", b"/metrics", b"/%00",
            b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/9.9\r\n", b"Host: a\r\n", b"Content-Length: 5\r\n",
            b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
            b"Transfer-Encoding: gzip, chunked\r\n", b"Expect: 100-continue\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n",
            b"Content-Encoding: gzip\r\n", b"X-Request-Id: \xff\xfe\r\n", b"traceparent: a\rb\r\n", b"\r\n", b"\r\n\r\n",
            b"0\r\n\r\n", b"5\r\nhello\r\n", GOOD, b"{}", b": \r\n",
        ]
    ),
    st.binary(max_size=30),
)  # fmt: skip


@unhurried
@given(st.lists(pieces, max_size=14), st.lists(st.integers(1, 300), max_size=4))
async def test_any_bytes(target: Target, parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    judged(await target.talk(*(data[a:b] for a, b in pairwise(edges)), patience_s=0.03))


@unhurried
@given(st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3))
async def test_a_good_request_damaged_somewhere(target: Target, at: int, put: bytes, drop: int) -> None:
    data = post("/v1/chat/completions", b'{"model":"emulated-moe","messages":[{"role":"user","content":"a"}]}')
    at %= len(data)
    judged(await target.talk(data[:at] + put + data[at + drop :], patience_s=0.03))


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from([2**64, -1, 1e400, MARK]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3) | st.just("role"), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    "model", "prompt", "messages", "stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens",
    "min_tokens", "logprobs", "prompt_logprobs", "echo", "stop", "seed", "temperature", "kv_transfer_params",
    "use_beam_search", "ignore_eos", "x",
)  # fmt: skip
bodies = st.fixed_dictionaries(
    {"model": st.just("emulated-moe")},
    optional={name: json_values for name in FIELDS if name not in ("model", "n")}
    | {"n": json_values | st.integers(0, 3)},
)


@settings(unhurried, max_examples=400)
@given(bodies, st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.booleans())
async def test_any_fields(target: Target, body: dict[str, Any], path: str, complete: bool) -> None:
    """Whatever the fields hold: an error object, or the workers' own word."""
    if complete:
        body = {"prompt": "a b", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **body}
    try:
        data = orjson.dumps(body)
    except TypeError:
        return
    # As the server reads it: an infinity is null.
    given_params = orjson.loads(data).get("kv_transfer_params") is not None
    received = sum(w.received for w in target.fleet.workers)
    answer = await target.talk(post(path, data))
    judged(answer)
    assert answer.startswith(b"HTTP/1.1 "), answer
    if given_params:
        assert answer.startswith(b"HTTP/1.1 4"), answer
        assert sum(w.received for w in target.fleet.workers) == received
