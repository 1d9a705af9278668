"""vLLM's dialect: bodies of both legs (cases R1-R6), answers, and streams that the official client's parser takes."""

from __future__ import annotations

import http.server
import json
import re
import threading
from typing import TYPE_CHECKING, Any

import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldrd.fleet import vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 1}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, min_size=1, max_size=5)


def prefill(fields: dict[str, Any], *, hand_off: bool = True) -> dict[str, Any]:
    return dict(json.loads(vllm.prefill_body(fields, "id", hand_off=hand_off)))


def decode(body: bytes) -> dict[str, Any]:
    return dict(json.loads(b"".join(vllm.decode_parts(body, PARAMS))))


# -- requests -----------------------------------------------------------------------------------------------------------


def test_r1_decode_body_is_the_clients_plus_the_hand_off() -> None:
    body = json.dumps(COMPLETION).encode()
    assert decode(body) == {**COMPLETION, "kv_transfer_params": PARAMS}
    assert prefill(COMPLETION)["max_tokens"] == 1


def test_r2_both_limits_are_capped_on_prefill_only() -> None:
    fields = {**CHAT, "max_completion_tokens": 50}
    sent = prefill(fields)
    assert (sent["max_completion_tokens"], sent["max_tokens"]) == (1, 1)
    assert decode(json.dumps(fields).encode())["max_completion_tokens"] == 50
    assert fields["max_completion_tokens"] == 50
    assert "max_completion_tokens" not in prefill(COMPLETION)


@pytest.mark.parametrize(("given_", "sent"), [(100, 1), (1, 1), (0, 0), (None, None)])
def test_r3_min_tokens(given_: int | None, sent: int | None) -> None:
    assert prefill({**COMPLETION, "min_tokens": given_})["min_tokens"] == sent
    assert decode(json.dumps({**COMPLETION, "min_tokens": given_}).encode())["min_tokens"] == given_


def test_r4_no_stream_on_prefill() -> None:
    sent = prefill({**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 1, "best_of": None})
    assert not {"stream", "stream_options", "n", "best_of"} & set(sent)


def test_r5_unknown_fields_reach_both() -> None:
    more = {"return_token_ids": True, "chat_template_kwargs": {"thinking": False}, "new": [1.5, None]}
    fields = {**CHAT, **more}
    for sent in (prefill(fields), decode(json.dumps(fields).encode())):
        assert {k: sent[k] for k in more} == more


def test_r6_decode_keeps_null_stream_and_usage_options() -> None:
    fields = {**CHAT, "stream": None, "stream_options": {"continuous_usage_stats": True}}
    sent = decode(json.dumps(fields).encode())
    assert sent["stream"] is None
    assert sent["stream_options"] == {"continuous_usage_stats": True}


def test_prefill_asks_for_the_hand_off_with_our_id() -> None:
    params = prefill(COMPLETION)["kv_transfer_params"]
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert params["eldr_id"] == "id"


def test_prefill_of_a_final_answer_asks_for_none() -> None:
    assert "kv_transfer_params" not in prefill({**COMPLETION, "kv_transfer_params": {"a": 1}}, hand_off=False)


@given(objects, st.sampled_from(["", " ", "\n", "\r\n\t  "]), st.booleans())
def test_splice_is_the_object_with_one_more_field(fields: dict[str, Any], space: str, indent: bool) -> None:
    fields = {"model": "m", **{k: v for k, v in fields.items() if k != "kv_transfer_params"}}
    body = (space + json.dumps(fields, indent=2 if indent else None) + space).encode()
    assert decode(body) == {**fields, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize("text", ["}", '"}', "{}}}", '\\"}'])
def test_splice_is_not_misled_by_braces_in_texts(text: str) -> None:
    fields = {"prompt": text}
    assert decode(json.dumps(fields).encode() + b" \n") == {**fields, "kv_transfer_params": PARAMS}


def test_post() -> None:
    head = vllm.post("/v1/completions", b"[::1]:8000", "id", 12, b"traceparent: x\r\n")
    assert head == (
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\n"
        b"Content-Length: 12\r\nX-Request-Id: id\r\ntraceparent: x\r\n\r\n"
    )


# -- answers ------------------------------------------------------------------------------------------------------------


def test_transfer_params() -> None:
    answer = {"kv_transfer_params": {**PARAMS, "eldr": {"ok": 1}}}
    assert vllm.transfer_params(answer) == PARAMS
    for none in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}, {"kv_transfer_params": [1]}):
        assert vllm.transfer_params(none) is None
    assert vllm.transfer_params({"kv_transfer_params": {**PARAMS, "do_remote_prefill": False}}) is None


@pytest.mark.parametrize(("reason", "done"), [("stop", True), ("length", False), (None, False), ("tool_calls", True)])
def test_finished(reason: str | None, done: bool) -> None:
    assert vllm.finished({"choices": [{"finish_reason": reason, "text": ""}]}) is done


@given(st.binary(max_size=40) | values.map(lambda v: json.dumps(v).encode()), st.booleans())
def test_parsed_is_whole_or_refused(body: bytes, chat: bool) -> None:
    try:
        answer = vllm.parsed(body, chat=chat)
    except ValueError:
        return
    assert answer["choices"]


@pytest.mark.parametrize(
    ("tail", "tokens"),
    [
        (b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":10,"completion_tokens":7}}\n\n', 7),
        (b'"usage": {"completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 1}}', 12),
        (b'"usage":{"completion_tokens":1}} "usage":{"completion_tokens":2}', 2),
        (b'"usage":null', None),
        (b"", None),
        (json.dumps({"text": '"usage": {"completion_tokens": 9}'}).encode(), None),
    ],
)
def test_completion_tokens(tail: bytes, tokens: int | None) -> None:
    assert vllm.completion_tokens(tail) == tokens


PIECES = (b'"usage"', b":", b" ", b"{", b"}", b'"completion_tokens":', b"7", b",", b'"prompt_tokens":3', b'"usage":{')


@given(st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join))
def test_completion_tokens_are_those_of_the_last_usage(tail: bytes) -> None:
    found = re.findall(rb'"usage":\s*\{[^{}]*?"completion_tokens":\s*(\d+)', tail)
    assert vllm.completion_tokens(tail) == (int(found[-1]) if found else None)


# -- early streams ------------------------------------------------------------------------------------------------------


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers every POST with ``body``, for the client's own parser to read."""

    body = b""
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="x", base_url=url, max_retries=0) as client:
        yield client


USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=20), include_usage=st.booleans())
def test_early_completion_stream(client: openai.OpenAI, text: str, include_usage: bool) -> None:
    text = text.encode("utf-8", "ignore").decode()
    choice = {"index": 0, "text": text, "finish_reason": "stop", "stop_reason": 7, "logprobs": None}
    answer = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": USAGE}
    Canned.body = vllm.early_stream(answer, chat=False, include_usage=include_usage)
    events = list(client.completions.create(model="m", prompt="x", stream=True))
    assert "".join(e.choices[0].text for e in events if e.choices) == text
    assert events[0].choices[0].finish_reason == "stop"
    assert all((e.id, e.model, e.object) == ("c", "m", "text_completion") for e in events)
    usages = [e.usage for e in events if e.usage]
    assert len(usages) == int(include_usage)
    if include_usage:
        assert events[-1].choices == []
        assert usages[0].completion_tokens == 1


@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=20), include_usage=st.booleans())
def test_early_chat_stream(client: openai.OpenAI, text: str, include_usage: bool) -> None:
    text = text.encode("utf-8", "ignore").decode()
    message = {"role": "assistant", "content": text, "refusal": None, "reasoning_content": "r"}
    answer = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": []}}],
    }  # fmt: skip
    Canned.body = vllm.early_stream(answer, chat=True, include_usage=include_usage)
    events = list(client.chat.completions.create(model="m", messages=[], stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == text
    assert events[1].choices[0].finish_reason == "stop"
    assert events[1].choices[0].delta.reasoning_content == "r"  # type: ignore[attr-defined]
    assert all(e.object == "chat.completion.chunk" for e in events)
    assert sum(e.usage is not None for e in events) == int(include_usage)


def test_early_chat_stream_of_tool_calls(client: openai.OpenAI) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"id": "c", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    Canned.body = vllm.early_stream(answer, chat=True, include_usage=False)
    stream = client.chat.completions.create(model="m", messages=[], stream=True)
    calls = [c for e in stream for choice in e.choices for c in choice.delta.tool_calls or []]
    assert [(c.index, c.function and c.function.name) for c in calls] == [(0, "f")]


def test_early_stream_ends_with_done() -> None:
    body = vllm.early_stream({"choices": [{"text": "a"}]}, chat=False, include_usage=False)
    assert body.endswith(b"\n\ndata: [DONE]\n\n")
    assert orjson.loads(body.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]["text"] == "a"


def test_the_id_goes_to_decode_only_where_it_is_to_count() -> None:
    body = json.dumps(COMPLETION).encode()
    counted = json.loads(b"".join(vllm.decode_parts(body, PARAMS, "r-1")))
    assert counted["kv_transfer_params"] == {**PARAMS, "eldr_id": "r-1"}
    assert "eldr_id" not in PARAMS


@pytest.mark.parametrize("size", [b"", b"2a\r\n", b"F\r\n"])
@pytest.mark.parametrize(
    "event", [b'data: {"error": {"code": 400}}\n\n', b'data: {"id": "a"}\n\n', b": ping\n\n", b"data: [DONE]\n\n"]
)
def test_start_of_a_stream_is_known_as_soon_as_it_can_be(size: bytes, event: bytes) -> None:
    """What is told of a start holds for every longer one."""
    stream = size + event
    known = [n for n in range(1, len(stream) + 1) if vllm.start_is_known(stream[:n])]
    assert known == list(range(known[0], len(stream) + 1))
    assert known[0] <= len(size) + len(b'data: {"error":')
    for n in known:
        assert vllm.failed_stream(stream[:n]) == (b"error" in event)
