"""Bodies of the OpenAI paths: arbitrary input is a Request or a Failure, and what the checks refuse."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eldrd.api.openai import CHAT, COMPLETIONS, PATHS, parse
from eldrd.fleet.vllm import decode_parts, prefill_body
from eldrd.handoff.failure import Failure

if TYPE_CHECKING:
    from eldrd.handoff.request import Request

MODELS = ("m",)
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "hello"},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
}
FIELDS = (
    "model", "prompt", "messages", "stream", "stream_options", "kv_transfer_params", "n", "best_of", "max_tokens",
    "max_completion_tokens", "min_tokens", "echo", "logprobs", "prompt_logprobs", "use_beam_search", "other",
)  # fmt: skip

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4), max_leaves=12
)
messages = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), values, max_size=2), max_size=3)
bodies = st.dictionaries(st.sampled_from(FIELDS), values | messages | st.just("m"), max_size=8)


def parsed(path: str, fields: dict[str, Any], headers: dict[str, str] | None = None) -> Request:
    return parse(path, json.dumps(fields).encode(), headers or {}, MODELS)


def refused(path: str, fields: dict[str, Any]) -> Failure:
    with pytest.raises(Failure) as e:
        parsed(path, fields)
    return e.value


def check(path: str, body: bytes, models: tuple[str, ...] = MODELS) -> Request | None:
    """Parse as the API does and go on to both legs' bodies: nothing but a Failure of 400 or 404 may come of it."""
    try:
        request = parse(path, body, {}, models)
    except Failure as f:
        assert f.status in (400, 404)  # noqa: PT017, also no failure is right
        assert f.outcome in ("bad_request", "unknown_model")  # noqa: PT017
        return None
    prefill = orjson.loads(prefill_body(request.fields, "id", hand_off=True))
    assert prefill["max_tokens"] == 1
    decode = json.loads(b"".join(decode_parts(request.body, {"remote_port": 1})))
    assert decode["kv_transfer_params"] == {"remote_port": 1}
    assert isinstance(request.prefix, bytes)
    assert len(request.prefix) <= 1024
    return request


@given(st.sampled_from(PATHS), st.binary(max_size=60))
@example(CHAT, b'{"messages":[{"content":"\\ud800"}]}')
@example(COMPLETIONS, b'\xef\xbb\xbf{"model":"m","prompt":"x"}')
@example(COMPLETIONS, b'{"model":"m","prompt":NaN}')
@example(COMPLETIONS, b'{"model":"m","prompt":"x"} {}')
def test_bytes(path: str, body: bytes) -> None:
    check(path, body)


@given(st.sampled_from(PATHS), values)
def test_json(path: str, value: Any) -> None:
    check(path, json.dumps(value).encode())


@given(st.sampled_from(PATHS), bodies, st.sampled_from([MODELS, (), ("m", "n")]))
def test_objects(path: str, fields: dict[str, Any], models: tuple[str, ...]) -> None:
    check(path, json.dumps(fields).encode(), models)


@given(st.sampled_from(PATHS), bodies)
def test_good_with_anything_else(path: str, more: dict[str, Any]) -> None:
    """Bodies that get far, so that the later checks are met as well."""
    request = check(path, json.dumps({**more, **GOOD[path]}).encode())
    if request is not None:
        assert request.model == "m"
        assert "kv_transfer_params" not in request.fields


@pytest.mark.parametrize("depth", [10, 250, 300, 1000, 1030, 10_000, 1_000_000])
@pytest.mark.parametrize("where", ["prompt", "messages", "other", "top"])
def test_deep_nesting(depth: int, where: str) -> None:
    deep = "[" * depth + "]" * depth
    if where == "top":
        body = deep
    elif where == "prompt":
        body = f'{{"model":"m","prompt":{deep}}}'
    elif where == "messages":
        body = f'{{"model":"m","messages":[{{"role":"user","content":{deep}}}]}}'
    else:
        body = f'{{"model":"m","prompt":"x","messages":[{{}}],"other":{deep}}}'
    path = CHAT if where == "messages" else COMPLETIONS
    request = check(path, body.encode())
    if depth > 1000:
        assert request is None
    if depth == 10 and where != "top":
        assert request is not None


def test_many_braces_are_not_depth() -> None:
    """A long conversation, and braces within texts."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "{[{["}]}] * 500
    assert check(CHAT, json.dumps({"model": "m", "messages": messages}).encode()) is not None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000])
def test_no_object(body: bytes) -> None:
    with pytest.raises(Failure) as e:
        parse(COMPLETIONS, body, {}, MODELS)
    assert e.value.status == 400


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": 7}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
        (COMPLETIONS, {"model": 7}, "model"),
        (COMPLETIONS, {"model": None}, None),
        (COMPLETIONS, {"stream": 1}, "stream"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": True}, "n"),
        (COMPLETIONS, {"stream": True, "stream_options": [1]}, "stream_options"),
        (COMPLETIONS, {"n": 2, "seed": 2**64 - 1}, "seed"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "echo"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"kv_transfer_params": {}}, "kv_transfer_params"),
        (COMPLETIONS, {"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": ["hello"]}, "messages"),
        (CHAT, {"kv_transfer_params": False}, "kv_transfer_params"),
    ],
)
def test_refused(path: str, more: dict[str, Any], param: str | None) -> None:
    fields = {**GOOD[path], **more}
    if param is None:
        assert parsed(path, fields).model == "m"
        return
    failure = refused(path, fields)
    assert (failure.status, failure.param) == (400, param)


def test_unknown_model() -> None:
    failure = refused(CHAT, {**GOOD[CHAT], "model": "gpt-" + "x" * 1000})
    assert (failure.status, failure.param, failure.outcome) == (404, "model", "unknown_model")
    assert len(failure.message) < 300


@pytest.mark.parametrize("key", ['"kv_transfer_params"', '"kv_transfer\\u005fparams"'])
def test_hand_off_of_the_client_never_passes(key: str) -> None:
    """Neither as null, nor doubled, nor escaped: D would take the last one."""
    body = f'{{"model":"m",{key}:{{"remote_host":"evil"}},"prompt":"x",{key}:null}}'.encode()
    request = parse(COMPLETIONS, body, {}, MODELS)
    assert b"evil" not in request.body
    assert b"transfer" not in request.body
    assert json.loads(request.body) == {"model": "m", "prompt": "x"}


@pytest.mark.parametrize("path", PATHS)
def test_bytes_of_the_client_are_kept(path: str) -> None:
    body = (
        b" "
        + json.dumps({**GOOD[path], "temperature": 1.0, "x": "\u00e9", "vllm_xargs": {"a": [1.50]}}).encode()
        + b"\n"
    )
    assert parse(path, body, {}, MODELS).body == body


@pytest.mark.parametrize(
    ("path", "more", "single"),
    [
        (COMPLETIONS, {}, False),
        (COMPLETIONS, {"max_tokens": 1}, True),
        (COMPLETIONS, {"max_tokens": 2}, False),
        (COMPLETIONS, {"max_tokens": True}, False),
        (COMPLETIONS, {"max_tokens": 1.0}, False),
        (CHAT, {"max_tokens": 1}, True),
        (CHAT, {"max_completion_tokens": 1}, True),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 5}, False),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 1}, True),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": None}, True),
    ],
)
def test_single_token(path: str, more: dict[str, Any], single: bool) -> None:
    assert parsed(path, {**GOOD[path], **more}).single_token is single


@pytest.mark.parametrize(
    ("more", "stream", "usage"),
    [
        ({"stream": None}, False, False),
        ({"stream": False, "stream_options": None}, False, False),
        ({"stream": True}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True, True),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, True, False),
    ],
)
def test_stream(more: dict[str, Any], stream: bool, usage: bool) -> None:
    request = parsed(CHAT, {**GOOD[CHAT], **more})
    assert (request.stream, request.include_usage) == (stream, usage)


def test_ids() -> None:
    own = parsed(CHAT, GOOD[CHAT], {"x-request-id": "mine"})
    other = parsed(CHAT, GOOD[CHAT], {"x-request-id": "mine"})
    assert own.client_id == other.client_id == "mine"
    assert own.id != other.id
    for bad in ("a\tb", "x" * 201, "a\udcff", "a\r\nb: c"):
        request = parsed(CHAT, GOOD[CHAT], {"x-request-id": bad})
        assert request.client_id == request.id


def test_ids_are_given_once() -> None:
    ids = [parsed(CHAT, GOOD[CHAT]).id for _ in range(2000)]
    assert len(set(ids)) == 2000
    assert all(len(id_) == 32 and int(id_, 16) >= 0 for id_ in ids)


def test_a_child_gives_ids_of_its_own() -> None:
    parsed(CHAT, GOOD[CHAT])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, parsed(CHAT, GOOD[CHAT]).id.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    of_child = os.read(reader, 32).decode()
    os.close(reader)
    os.close(writer)
    assert of_child not in [parsed(CHAT, GOOD[CHAT]).id for _ in range(300)]


@pytest.mark.parametrize("inside", [{"other": "x" * 1000}, {"other": [1] * 1000}])
def test_depth(inside: dict[str, Any]) -> None:
    """At most 200 levels, whatever else the body holds; the root is the first."""
    for levels, ok in ((199, True), (200, False)):
        body = json.dumps({**GOOD[COMPLETIONS], **inside})[:-1] + ', "deep": ' + "[" * levels + "]" * levels + "}"
        if ok:
            parse(COMPLETIONS, body.encode(), {}, MODELS)
        else:
            with pytest.raises(Failure):
                parse(COMPLETIONS, body.encode(), {}, MODELS)


@given(st.text(max_size=300))
def test_headers_of_the_client_add_no_lines(value: str) -> None:
    request = parsed(CHAT, GOOD[CHAT], {"traceparent": value, "x-request-id": value, "authorization": "secret"})
    assert request.passed_headers.count(b"\r\n") <= 1
    assert b"\n" not in request.passed_headers.replace(b"\r\n", b"", 1)
    assert b"secret" not in request.passed_headers
    assert not {"\r", "\n", "\0"} & set(request.client_id)


@given(st.text(max_size=300))
def test_labels_can_be_written(value: str) -> None:
    label = parsed(CHAT, GOOD[CHAT], {"x-eldrd-label": value}).label
    if label is not None:
        assert len(label.encode()) <= 256


def test_labels_that_cannot_be_written() -> None:
    assert parsed(CHAT, GOOD[CHAT], {"x-eldrd-label": "code"}).label == "code"
    for bad in ("a\udcff", "x" * 1000, "a\nb"):
        assert parsed(CHAT, GOOD[CHAT], {"x-eldrd-label": bad}).label is None


def test_prefixes_of_like_prompts_are_equal() -> None:
    head = "system " * 400
    one, two = (parsed(COMPLETIONS, {"model": "m", "prompt": head + end}) for end in ("a", "b"))
    assert one.prefix == two.prefix
    assert parsed(COMPLETIONS, {"model": "m", "prompt": "other"}).prefix != one.prefix
    chats = [
        parsed(
            CHAT, {"model": "m", "messages": [{"role": "system", "content": head}, {"role": "user", "content": end}]}
        )
        for end in ("a", "b")
    ]
    assert chats[0].prefix == chats[1].prefix
    ids = [parsed(COMPLETIONS, {"model": "m", "prompt": [*range(5000), end]}) for end in (1, 2)]
    assert ids[0].prefix == ids[1].prefix
