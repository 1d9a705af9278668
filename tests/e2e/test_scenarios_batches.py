"""Scenarios B1-B4: several answers are several hand-offs, the prompt's own logprobs are refused, and what ends at its first
token ends there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest
from stage import CHAT, COMPLETIONS, ask, chat, until

if TYPE_CHECKING:
    from stage import Reply, Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("more", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {"prompt_logprobs": 0}])
async def test_b3_logprobs_of_the_prompt(stage: Stage, more: dict[str, Any]) -> None:
    """D has no logits of the prompt, P none of the answer: refused, with the field at fault."""
    reply = await stage.post(ask(**more))
    assert reply.status == 400
    assert reply.error["param"] in more
    assert "prefill and decode" in reply.error["message"]
    assert sum(w.received for w in (*stage.prefill, *stage.decode)) == 0


async def test_b3_echo_alone(stage: Stage) -> None:
    direct = await stage.post(ask(6, echo=True), url=stage.prefill[0].url)
    reply = await stage.post(ask(6, echo=True))
    assert reply.text == direct.text


async def ended_at_prefill(stage: Stage, body: dict[str, Any], path: str, expected: str, reason: str) -> None:
    """The answer is P's one token, whole and in the asked form; no KV stays pinned and D's engine has seen nothing."""
    options = {"include_usage": True}
    streamed = await stage.post({**body, "stream": True, "stream_options": options}, path)
    reply = await stage.post(body, path)
    for r in (streamed, reply):
        assert r.whole
        assert r.text == expected
    assert streamed.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = [orjson.loads(e) for e in streamed.events[:-1]]
    assert streamed.events[-1] == b"[DONE]"
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == reason
    assert reply.json["choices"][0]["finish_reason"] == reason
    assert "kv_transfer_params" not in reply.json
    assert len({e["id"] for e in events}) == 1
    for usage in (events[-1]["usage"], reply.json["usage"]):
        assert usage["completion_tokens"] == 1
        assert usage["total_tokens"] == usage["prompt_tokens"] + 1
    await until(lambda: stage.fleet.pinned == 0)
    assert stage.generated() == 0
    assert sum(d.engine.local_prefills for d in stage.decode) == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_b4_end_of_text_at_the_first_token(stage: Stage, path: str) -> None:
    body = ask(max_tokens=50) if path == COMPLETIONS else chat(max_tokens=50)
    expected = (await stage.post({**body, "max_tokens": 1}, path, url=stage.prefill[0].url)).text
    stage.fault(stage.prefill, finish_first=True)
    await ended_at_prefill(stage, body, path, expected, "stop")
    assert stage.ends() == {"released": 2}


async def test_b4_stop_string_at_the_first_token(stage: Stage) -> None:
    first = (await stage.post(ask(max_tokens=1))).text.strip()
    await ended_at_prefill(stage, ask(stop=[first]), COMPLETIONS, " ", "stop")
    assert stage.ends() == {"released": 2}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_b4_one_token_asked_for(stage: Stage, path: str) -> None:
    body = ask(max_tokens=1) if path == COMPLETIONS else chat(max_completion_tokens=1)
    expected = (await stage.post(body, path, url=stage.prefill[0].url)).text
    await ended_at_prefill(stage, body, path, expected, "length")
    assert stage.ends() == {}
    assert sum(d.received for d in stage.decode) == 0


def strip(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two runs of the same request."""
    usage = {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"}
    choices = [{k: v for k, v in c.items() if k != "prompt_token_ids"} for c in answer["choices"]]
    return {"object": answer["object"], "model": answer["model"], "choices": choices, "usage": usage}


def texts(reply: Reply) -> dict[int, str]:
    """The text of each choice of a stream."""
    out: dict[int, str] = {}
    for event in reply.events:
        if event != b"[DONE]":
            for c in orjson.loads(event)["choices"]:
                out[c["index"]] = out.get(c["index"], "") + (c.get("text") or c.get("delta", {}).get("content") or "")
    return out


SEVERAL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, ask(prompt=["a b c", "d e"])),
    (COMPLETIONS, ask(prompt=["a b c", "a b c", "f"], n=2, seed=3)),
    (COMPLETIONS, ask(prompt=[[5, 6, 7], [8, 9]])),
    (COMPLETIONS, ask(n=4, seed=3)),
    (CHAT, chat(n=4, seed=3, max_tokens=9)),
    (COMPLETIONS, ask(n=3, seed=3, max_tokens=1)),
]


@pytest.mark.parametrize(("path", "body"), SEVERAL)
async def test_b1_b2_several_answers(stage: Stage, path: str, body: dict[str, Any]) -> None:
    """One hand-off each; indices, texts and usage are those of a server that does it all by itself."""
    direct = await stage.post(body, path, url=stage.prefill[0].url)
    await stage.clean()
    reply = await stage.post(body, path)
    assert reply.status == 200, reply.body
    assert strip(reply.json) == strip(direct.json)
    n = len(direct.json["choices"])
    assert stage.ends() == ({"consumed": n} if body["max_tokens"] > 1 else {})


@pytest.mark.parametrize(("path", "body"), SEVERAL)
async def test_b1_b2_several_answers_streamed(stage: Stage, path: str, body: dict[str, Any]) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    direct = await stage.post(body, path, url=stage.prefill[0].url)
    reply = await stage.post(body, path)
    assert reply.whole
    assert texts(reply) == texts(direct)
    usage, expected = (orjson.loads(r.events[-2])["usage"] for r in (reply, direct))
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == expected[key]
    assert len({orjson.loads(e)["id"] for e in reply.events[:-1]}) == 1
    # Nobody asked: no usage event then.
    bare = await stage.post({k: v for k, v in body.items() if k != "stream_options"}, path)
    assert bare.whole
    assert all(orjson.loads(e)["choices"] for e in bare.events[:-1])


async def test_b2_one_of_four_fails(stage: Stage) -> None:
    """The whole is an error, and what the others hold is given back."""
    stage.fault(stage.decode[:1], status=422)
    reply = await stage.post(ask(n=4, seed=1))
    assert reply.status == 422
    assert reply.error["message"] == "Emulated fault"
    await until(lambda: stage.fleet.pinned == 0)
    assert set(stage.ends()) <= {"consumed", "released"}


async def test_b2_client_leaves(stage: Stage) -> None:
    body = ask(n=4, seed=1, max_tokens=2000, stream=True)
    await stage.leave(body, lambda: sum(d.engine.decode.running for d in stage.decode) == 4)
    await until(lambda: sum(d.engine.finished.total() for d in stage.decode) == 4)
    assert sum(d.engine.finished["abort"] for d in stage.decode) == 4
    assert stage.ends() == {"consumed": 4}


@pytest.mark.parametrize("faults", [{"gzip": True}, {"die_after_chunks": 3}, {"die_after_chunks": 3, "cut": "close"}])
async def test_b2_one_of_four_is_lost(stage: Stage, faults: dict[str, Any]) -> None:
    """A choice that cannot be read to its end is missing: the stream ends with an error, never as if whole."""
    stage.fault(stage.decode[:1], **faults)
    reply = await stage.post(ask(n=4, seed=1, max_tokens=50, stream=True))
    assert b"[DONE]" not in reply.body
    assert reply.cut or reply.status == 502
    assert orjson.loads(reply.events[-1])["error"]["code"] == 502
    await until(lambda: not any(d.engine.decode.running for d in stage.decode))


@pytest.mark.parametrize("stream", [False, True])
async def test_b2_all_are_lost(stage: Stage, stream: bool) -> None:
    """Nothing of any choice can be read: an error object, not a connection that just ends."""
    stage.fault(stage.decode, gzip=True)
    reply = await stage.post(ask(n=2, seed=1, stream=stream))
    assert reply.status == 502
    assert reply.error["type"] == "BadGatewayError"
