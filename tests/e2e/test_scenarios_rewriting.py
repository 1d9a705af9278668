"""Scenarios R1-R7: prefill gets one token's worth of the request, decode the client's own bytes plus the hand-off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest
from stage import CHAT, COMPLETIONS, MODEL, ask, chat

if TYPE_CHECKING:
    from stage import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")

KV = "kv_transfer_params"


async def legs(stage: Stage, body: Any, path: str = COMPLETIONS) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies that prefill and decode got for a request that is served; decode's starts with the client's bytes."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    reply = await stage.post(data, path)
    assert reply.status == 200, reply.body
    (prefill,) = [s for w in stage.prefill for s in w.seen]
    (decode,) = [s for w in stage.decode for s in w.seen]
    assert decode[1].startswith(data.rstrip()[:-1])
    p, d = orjson.loads(prefill[1]), orjson.loads(decode[1])
    given = d.pop(KV)
    assert given["do_remote_prefill"] is True
    assert given["remote_engine_id"] in {w.engine.ledger.engine_id for w in stage.prefill}
    asked = p.pop(KV)
    assert asked["do_remote_decode"] is True
    assert asked["do_remote_prefill"] is False
    assert d == orjson.loads(data)
    return p, d


async def test_r1_max_tokens_absent(stage: Stage) -> None:
    body = ask()
    del body["max_tokens"]
    p, d = await legs(stage, body)
    assert p == {**body, "max_tokens": 1}
    assert d == body


@pytest.mark.parametrize(
    "layout", [b'{ "model" : "%b",\n "prompt":"a b" }\n', b'{"prompt":"\\u0061 b","model":"%b"}  \r\n']
)
async def test_r1_decode_gets_the_bytes_as_they_are(stage: Stage, layout: bytes) -> None:
    await legs(stage, layout % MODEL.encode())


async def test_r2_max_completion_tokens(stage: Stage) -> None:
    p, d = await legs(stage, chat(max_completion_tokens=9), CHAT)
    assert p["max_completion_tokens"] == 1
    assert d["max_completion_tokens"] == 9
    assert "max_tokens" not in d


async def test_r3_min_tokens(stage: Stage) -> None:
    """P cannot be asked for 100 tokens of one; what must stay is that its one token may not end the answer."""
    p, d = await legs(stage, ask(min_tokens=100, max_tokens=120, ignore_eos=False))
    assert p["min_tokens"] == 1
    assert d["min_tokens"] == 100


async def test_r4_stream_options(stage: Stage) -> None:
    p, d = await legs(stage, ask(stream=True, stream_options={"include_usage": True}))
    assert "stream" not in p
    assert "stream_options" not in p
    assert d["stream_options"] == {"include_usage": True}


async def test_r5_unknown_fields(stage: Stage) -> None:
    extra = {
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "x_new": [1, {"a": None}],
        "temperature": 0.7,
        "seed": 5,
        "user": "ü",
    }
    p, d = await legs(stage, chat(max_tokens=4, **extra), CHAT)
    assert {k: p[k] for k in extra} == extra
    assert {k: d[k] for k in extra} == extra


@pytest.mark.parametrize("extra", [{"stream": None}, {"stream": None, "stream_options": None}, {"stream": False}])
async def test_r6_stream_null(stage: Stage, extra: dict[str, Any]) -> None:
    reply = await stage.post(ask(**extra))
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.json["object"] == "text_completion"


async def test_r6_continuous_usage_stats(stage: Stage) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    p, d = await legs(stage, ask(stream=True, stream_options=options))
    assert "stream_options" not in p
    assert d["stream_options"] == options
    reply = await stage.post(ask(stream=True, stream_options=options))
    usages = [orjson.loads(e)["usage"]["completion_tokens"] for e in reply.events[:-1]]
    assert usages == [*range(1, 13), 12]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "value",
    [b'{"do_remote_prefill":true,"remote_host":"evil"}', b"{}", b"[]", b'"x"', b"1", b"false", b"0"],
)
@pytest.mark.parametrize("name", [b"kv_transfer_params", b"kv_transfer_param\\u0073"])
async def test_r7_clients_own_transfer_params(stage: Stage, path: str, value: bytes, name: bytes) -> None:
    body = orjson.dumps(ask() if path == COMPLETIONS else chat())
    reply = await stage.post(body[:-1] + b',"%b":%b}' % (name, value), path)
    assert reply.status == 400
    assert reply.error["param"] == KV
    assert sum(w.received for w in (*stage.prefill, *stage.decode)) == 0


async def test_r7_duplicate_keys_do_not_smuggle(stage: Stage) -> None:
    """A key given twice, null last: what a parser with other habits sees must not reach a worker."""
    body = orjson.dumps(ask())
    reply = await stage.post(body[:-1] + b',"kv_transfer_params":{"do_remote_prefill":true},"kv_transfer_params":null}')
    assert reply.status in (200, 400)
    for worker in (*stage.prefill, *stage.decode):
        for _, seen in worker.seen:
            assert seen.count(b"kv_transfer_params") == 1
