"""OpenAI error objects, in vLLM's shape. Messages never repeat what the client sent, beyond a field's or model's name."""

from __future__ import annotations

import orjson

from eldrd.handoff.answer import Answer
from eldrd.handoff.failure import Failure

JSON_TYPE = (b"content-type", b"application/json")


def error_body(failure: Failure) -> bytes:
    """{"error": {"message", "type", "param", "code"}} (vllm/entrypoints/openai: ErrorResponse)."""
    return orjson.dumps(
        {"error": {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.status}}
    )


def error_answer(failure: Failure) -> Answer:
    headers = [JSON_TYPE]
    if failure.retry_after_s is not None:
        headers.append((b"retry-after", str(failure.retry_after_s).encode()))
    return Answer(failure.status, error_body(failure), headers)


def bad_request(message: str, param: str | None = None) -> Failure:
    return Failure(400, "BadRequestError", message, param=param, outcome="bad_request")


def unknown_model(model: str) -> Failure:
    # The name goes back to the client alone; metrics and logs see the outcome.
    return Failure(
        404, "NotFoundError", f"The model `{model[:200]}` does not exist.", param="model", outcome="unknown_model"
    )


def unknown_path() -> Failure:
    return Failure(404, "NotFoundError", "No such path.", outcome="unknown_path")


def wrong_method(allowed: str) -> Failure:
    return Failure(405, "MethodNotAllowedError", f"Use {allowed} for this path.", outcome="wrong_method")


def too_large(limit: int) -> Failure:
    return Failure(413, "RequestEntityTooLargeError", f"The body is larger than {limit} bytes.", outcome="too_large")


def internal() -> Failure:
    return Failure(500, "InternalServerError", "eldrd failed on this request; its log says where.", outcome="internal")
