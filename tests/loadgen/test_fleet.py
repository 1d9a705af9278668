"""The emulated workers speak vLLM's dialect, keep the hand-off rules and batch continuously."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
from typing import TYPE_CHECKING

import aiohttp
import openai
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.fleet import EmulatedFleet, Faults, Worker
from loadgen.fleet.decode import StepCost
from loadgen.fleet.prefill import PrefillCost

if TYPE_CHECKING:
    from collections.abc import Callable

ASK_P = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def text(words: int, start: int = 0) -> str:
    return " ".join(f"word{i}" for i in range(start, start + words))


async def post(http, worker: Worker, body: dict, path: str = "/v1/completions", **kw) -> tuple[int, dict]:
    async with http.post(worker.url + path, json=body, **kw) as r:
        return r.status, orjson.loads(await r.read())


async def prefill(http, worker: Worker, prompt: str) -> dict:
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASK_P}
    status, answer = await post(http, worker, body)
    assert status == 200
    return answer["kv_transfer_params"]


async def events(response: aiohttp.ClientResponse) -> list[bytes]:
    raw = await response.read()
    assert raw.endswith(b"\n\n")
    return raw[:-2].split(b"\n\n")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110, nothing tells
            await asyncio.sleep(0.005)


async def metric(http, worker: Worker, name: str) -> float:
    async with http.get(worker.url + "/metrics") as r:
        page = await r.text()
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples if s.name == name]
    assert all(s.labels["engine"] == "0" and s.labels["model_name"] == worker.model.spec.name for s in samples)
    return sum(s.value for s in samples)


async def test_disaggregated_output_equals_a_plain_servers(fleet, http):
    for n in (1, 31, 32, 33, 300):
        body = {"prompt": text(n), "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        _, plain = await post(http, fleet.plain[0], body)
        params = await prefill(http, fleet.prefill[0], text(n))
        assert len(params["remote_block_ids"][0]) == -(-n // 32)
        assert params["remote_num_tokens"] == n
        _, split = await post(http, fleet.decode[0], {**body, "kv_transfer_params": params})
        assert split["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        assert split["choices"][0]["text"] == plain["choices"][0]["text"]
        assert split["kv_transfer_params"] is None
    assert fleet.violations == []
    assert fleet.decode[0].engine.local_prefills == 0


async def test_stream_has_vllms_bytes(fleet, http):
    body = {
        "prompt": text(40),
        "max_tokens": 3,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"X-Request-Id": "abc"}
    async with http.post(fleet.plain[0].url + "/v1/completions", json=body, headers=headers) as r:
        assert r.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert r.headers["Transfer-Encoding"] == "chunked"
        got = await events(r)
    assert len(got) == 5
    first = orjson.loads(got[0].removeprefix(b"data: "))
    created = first["created"]
    word = first["choices"][0]["text"]
    assert word.startswith(" ")
    assert got[0].decode() == (
        f'data: {{"id":"cmpl-abc","object":"text_completion","created":{created},"model":"emulated-moe","choices":'
        f'[{{"index":0,"text":"{word}","logprobs":null,"finish_reason":null,"stop_reason":null,'
        '"prompt_token_ids":null,"token_ids":null}]}'
    )
    assert orjson.loads(got[2].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    usage = orjson.loads(got[3].removeprefix(b"data: "))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["total_tokens"] == 43
    assert got[4] == b"data: [DONE]"


async def test_streamed_text_equals_whole_text_for_both_paths(fleet, http):
    for path, body in (
        ("/v1/completions", {"prompt": text(10)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text(10)}]}),
    ):
        body |= {"max_tokens": 30, "stop": ["zo", "ba d"], "n": 2, "seed": 3}
        _, whole = await post(http, fleet.plain[0], body, path)
        async with http.post(fleet.plain[0].url + path, json={**body, "stream": True}) as r:
            got = [orjson.loads(e.removeprefix(b"data: ")) for e in (await events(r))[:-1]]
        for i, choice in enumerate(whole["choices"]):
            pieces = [c for e in got for c in e["choices"] if c["index"] == i]
            if "delta" in pieces[0]:
                assert pieces[0]["delta"]["role"] == "assistant"
                assert "".join(p["delta"]["content"] for p in pieces) == choice["message"]["content"]
            else:
                assert "".join(p["text"] for p in pieces) == choice["text"]
            assert pieces[-1]["finish_reason"] == choice["finish_reason"]


async def test_stop_string_ends_and_is_left_out(fleet, http):
    body = {"prompt": text(10), "max_tokens": 50, "ignore_eos": True}
    _, full = await post(http, fleet.plain[0], body)
    words = full["choices"][0]["text"].split()
    _, cut = await post(http, fleet.plain[0], {**body, "stop": words[4]})
    choice = cut["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == words[4]
    assert choice["text"] == "".join(f" {w}" for w in words[: words.index(words[4])]) + " "
    assert cut["usage"]["completion_tokens"] == words.index(words[4]) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(fleet, http, stream):
    words = fleet.model.vocabulary
    prompt = words.decode(range(1, 6))
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    _, plain = await post(http, fleet.plain[0], body)
    async with http.post(fleet.plain[0].url + "/v1/completions", json={**body, "echo": True, "stream": stream}) as r:
        raw = await r.read()
    parts = raw.split(b"\n\n")[:-2] if stream else [raw]
    echoed = "".join(orjson.loads(e.removeprefix(b"data: "))["choices"][0]["text"] for e in parts)
    assert echoed == prompt + plain["choices"][0]["text"]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "truncated"),
        (b"[]", 400, "object"),
        (b'{"prompt": 5}', 400, "prompt"),
        (b"{}", 400, "prompt"),
        (b'{"prompt": "a", "model": "other"}', 404, "other"),
        (b'{"prompt": "a", "max_tokens": 4, "min_tokens": 5}', 400, "min_tokens"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true}}', 400, "Stream options"),
        (b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 2048}', 400, "maximum context length"),
    ],
)
async def test_bad_input_gets_vllms_error_object(fleet, http, body, status, word):
    async with http.post(fleet.decode[0].url + "/v1/completions", data=body) as r:
        assert r.status == status
        error = orjson.loads(await r.read())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert word in error["message"]


async def test_hand_off_is_good_for_one_use(fleet, http):
    params = await prefill(http, fleet.prefill[0], text(100))
    body = {"prompt": text(100), "max_tokens": 2, "kv_transfer_params": params}
    first, _ = await post(http, fleet.decode[0], body)
    second, answer = await post(http, fleet.decode[1], body)
    assert (first, second) == (200, 500)
    assert answer["error"]["code"] == 500
    assert [(v.kind, v.worker) for v in fleet.violations] == [("consumed", "d1")]


async def test_hand_off_ends_with_its_lease(fleet, http):
    ledger = fleet.prefill[0].engine.ledger
    ledger.lease_s = 1.0
    params = await prefill(http, fleet.prefill[0], text(100))
    assert await metric(http, fleet.prefill[0], "vllm:kv_cache_usage_perc") > 0
    assert await metric(http, fleet.prefill[0], "vllm:num_requests_running") == 0
    await until(lambda: ledger.pinned == 0)
    assert await metric(http, fleet.prefill[0], "vllm:kv_cache_usage_perc") == 0
    assert await metric(http, fleet.prefill[0], "vllm:nixl_num_kv_expired_reqs_total") == 1
    body = {"prompt": text(100), "max_tokens": 2, "stream": True, "kv_transfer_params": params}
    async with http.post(fleet.decode[0].url + "/v1/completions", json=body) as r:
        assert r.status == 200
        got = await events(r)
    assert orjson.loads(got[0].removeprefix(b"data: "))["error"]["code"] == 500
    assert got[1] == b"data: [DONE]"
    assert [v.kind for v in fleet.violations] == ["expired"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"remote_block_ids": None}, "malformed"),
        ({"remote_block_ids": [[1]]}, "blocks_short"),
        ({"remote_engine_id": "gone"}, "unknown_engine"),
        ({"remote_request_id": "cmpl-x"}, "unknown"),
    ],
)
async def test_wrong_hand_offs_are_recorded(fleet, http, change, kind):
    params = await prefill(http, fleet.prefill[0], text(100))
    body = {"prompt": text(100), "kv_transfer_params": {**params, **change}}
    status, _ = await post(http, fleet.decode[0], body)
    assert status == 500
    assert [v.kind for v in fleet.violations] == [kind]


async def test_kv_of_another_prompt_is_recorded(fleet, http):
    params = await prefill(http, fleet.prefill[0], text(100))
    status, _ = await post(http, fleet.decode[0], {"prompt": text(100, 7), "kv_transfer_params": params})
    assert status == 500
    assert [v.kind for v in fleet.violations] == ["wrong_prompt"]


async def test_restarted_worker_keeps_its_port_and_loses_its_hand_offs(fleet, http):
    p = fleet.prefill[0]
    url, params = p.url, await prefill(http, p, text(100))
    await p.stop()
    with pytest.raises(aiohttp.ClientConnectionError):
        await prefill(http, p, text(100))
    await p.start()
    assert p.url == url
    assert (await prefill(http, p, text(100)))["remote_engine_id"] != params["remote_engine_id"]
    status, _ = await post(http, fleet.decode[0], {"prompt": text(100), "kv_transfer_params": params})
    assert status == 500


async def test_prefix_cache_counts_and_resets(fleet, http):
    p = fleet.prefill[0]
    for n, cached in ((100, 0), (100, 96), (128, 96), (128, 96), (64, 32)):
        _, answer = await post(http, p, {"prompt": text(n), "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert await metric(http, p, "vllm:prefix_cache_hits_total") == 320
    assert await metric(http, p, "vllm:prefix_cache_queries_total") == 520
    async with http.post(p.url + "/reset_prefix_cache") as r:
        assert r.status == 200
    _, answer = await post(http, p, {"prompt": text(100), "max_tokens": 1})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_requests_join_and_leave_the_running_batch(fleet, http):
    d = fleet.plain[0]
    lengths = (5, 40, 80)
    body = {"prompt": text(40), "ignore_eos": True}
    await asyncio.gather(*(post(http, d, {**body, "max_tokens": n}) for n in lengths))
    steps = d.engine.decode.steps
    # The first token of each comes from its prefill.
    assert sum(s.batch for s in steps) == sum(n - 1 for n in lengths)
    assert max(s.batch for s in steps) >= 2
    assert steps[-1].batch == 1
    assert all(0 < s.active <= min(16, 2 * s.batch) for s in steps)


async def test_step_time_follows_active_experts(fast, http):
    spec = dataclasses.replace(fast, step_cost=StepCost(0.002, 0.004, 0.0))
    async with EmulatedFleet(spec) as fleet:
        d = fleet.plain[0]
        ask = [{"prompt": text(40, 50 * i), "ignore_eos": True, "max_tokens": 20} for i in range(4)]
        await asyncio.gather(*(post(http, d, a) for a in ask))
        steps = list(d.engine.decode.steps)
    excess = [b.t - a.t - (0.002 + 0.004 * b.active) for a, b in itertools.pairwise(steps)]
    assert min(excess) > -1e-6
    # A busy machine makes steps late, but not all: a fifth are as long as they should be, to one expert's time.
    assert statistics.quantiles(excess, n=5)[0] < 0.004
    assert len({s.active for s in steps}) > 3


async def test_max_num_seqs_makes_the_rest_wait(fast, http):
    spec = dataclasses.replace(fast, max_num_seqs=2, step_cost=StepCost(0.004, 0.0, 0.0))
    async with EmulatedFleet(spec) as fleet:
        d = fleet.plain[0]
        asks = [
            asyncio.create_task(post(http, d, {"prompt": text(9), "ignore_eos": True, "max_tokens": 150}))
            for _ in range(5)
        ]
        await until(lambda: (d.engine.decode.running, d.engine.decode.waiting) == (2, 3))
        assert await metric(http, d, "vllm:num_requests_running") == 2
        assert await metric(http, d, "vllm:num_requests_waiting") == 3
        assert {status for status, _ in await asyncio.gather(*asks)} == {200}
        assert max(s.batch for s in d.engine.decode.steps) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_aborts_its_request(fast, http, stream):
    spec = dataclasses.replace(fast, step_cost=StepCost(0.01, 0.0, 0.0))
    async with EmulatedFleet(spec) as fleet:
        p, d = fleet.prefill[0], fleet.decode[0]
        params = await prefill(http, p, text(100))
        body = {"prompt": text(100), "max_tokens": 500, "ignore_eos": True, "stream": stream}
        ask = asyncio.create_task(post(http, d, {**body, "kv_transfer_params": params}))
        await until(lambda: d.engine.decode.running == 1)
        ask.cancel()
        await until(lambda: d.engine.decode.running == 0)
        assert d.engine.pool.usage == p.engine.pool.usage == 0
        assert d.engine.finished == {"abort": 1}
        assert p.engine.ledger.ends == {"consumed": 1}


async def test_client_that_leaves_during_prefill_leaves_nothing_pinned(fast, http):
    spec = dataclasses.replace(fast, prefill_cost=PrefillCost(1.0, 0.0))
    async with EmulatedFleet(spec) as fleet:
        p = fleet.prefill[0]
        asks = [asyncio.create_task(prefill(http, p, text(100, 100 * i))) for i in range(2)]
        await until(lambda: (p.engine.prefill.running, p.engine.prefill.waiting) == (1, 1))
        for a in asks:
            a.cancel()
        await until(lambda: (p.engine.prefill.running, p.engine.prefill.waiting) == (1, 0))
        await until(lambda: p.engine.prefill.running == 0)
        assert p.engine.pool.usage == 0
        assert p.engine.ledger.pinned == 0
        assert p.engine.finished == {"abort": 2}


async def test_one_request_id_twice_makes_two_hand_offs(fleet, http):
    ids = []
    for _ in range(2):
        body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": ASK_P}
        _, answer = await post(http, fleet.prefill[0], body, headers={"X-Request-Id": "same"})
        assert answer["id"] == "cmpl-same"
        ids.append(answer["kv_transfer_params"]["remote_request_id"])
    assert ids[0] != ids[1]
    assert all(i.startswith("cmpl-same-0-") for i in ids)


async def test_official_client_understands_the_answers(fleet):
    async with openai.AsyncOpenAI(base_url=fleet.plain[0].url + "/v1", api_key="none", max_retries=0) as api:
        ask = {"model": "emulated-moe", "max_tokens": 6, "extra_body": {"ignore_eos": True}}
        whole = await api.completions.create(prompt=text(5), **ask)
        streamed = [c async for c in await api.completions.create(prompt=text(5), stream=True, **ask)]
        assert "".join(c.choices[0].text for c in streamed) == whole.choices[0].text
        messages = [{"role": "user", "content": text(5)}]
        chat = await api.chat.completions.create(messages=messages, **ask)
        deltas = [c async for c in await api.chat.completions.create(messages=messages, stream=True, **ask)]
        assert "".join(c.choices[0].delta.content for c in deltas) == chat.choices[0].message.content
        assert chat.usage.completion_tokens == whole.usage.completion_tokens == 6
        with pytest.raises(openai.NotFoundError):
            await api.completions.create(prompt="a", model="other")


async def test_waiting_prompt_is_admitted_when_pinned_blocks_are_released(fast, http):
    async with EmulatedFleet(dataclasses.replace(fast, kv_blocks=8, lease_s=0.4)) as fleet:
        p = fleet.prefill[0]
        await prefill(http, p, text(160))
        await prefill(http, p, text(160, 500))
        assert p.engine.ledger.ends["expired"] >= 1


async def test_faults(fleet, http):
    p, d = fleet.prefill[0], fleet.decode[0]
    p.faults.drop_params = True
    assert await prefill(http, p, text(40)) is None
    p.faults.status = 503
    status, answer = await post(http, p, {"prompt": "a"})
    assert (status, answer["error"]["code"]) == (503, 503)
    async with http.post(d.url + "/emulated/faults", json={"die_after_chunks": 3, "health_status": 503}) as r:
        assert r.status == 200
    assert d.faults == Faults(die_after_chunks=3, health_status=503)
    async with http.get(d.url + "/health") as r:
        assert r.status == 503
    body = {"prompt": "a", "max_tokens": 50, "stream": True, "ignore_eos": True}
    got = bytearray()

    async def read() -> None:
        async with http.post(d.url + "/v1/completions", json=body) as r:
            async for part in r.content.iter_any():
                got.extend(part)

    with pytest.raises(aiohttp.ClientPayloadError):
        await read()
    assert 3 <= got.count(b"data: ") < 10
    assert b"[DONE]" not in got
    d.faults = Faults(refuse=True)
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(http, d, body)


async def test_models_version_and_stats(fleet, http):
    d = fleet.decode[0]
    async with http.get(d.url + "/v1/models") as r:
        assert [m["id"] for m in orjson.loads(await r.read())["data"]] == ["emulated-moe"]
    async with http.get(d.url + "/version") as r:
        assert orjson.loads(await r.read()) == {"version": "0.32.0"}
    await post(http, d, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    async with http.get(d.url + "/emulated/stats") as r:
        stats = orjson.loads(await r.read())
    assert len(stats["steps"]) == 2
    assert stats["local_prefills"] == 1
    async with http.get(d.url + "/emulated/stats?since=2") as r:
        assert orjson.loads(await r.read())["steps"] == []
