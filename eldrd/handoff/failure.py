"""How a request fails: the one exception that api turns into an OpenAI error object. No HTTP is written here."""

from __future__ import annotations


class Failure(Exception):
    """A request that ends without a worker's answer.

    status: HTTP status; kind: the error object's type; message: for the client, never with request content; param: the
    field at fault; outcome: constant for logs and metrics; retry_after_s: advice sent as Retry-After.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        outcome: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.outcome = outcome
        self.retry_after_s = retry_after_s


def no_worker(role: str) -> Failure:
    return Failure(
        503,
        "ServiceUnavailableError",
        f"No {role} worker is available.",
        outcome=f"no_{role}_worker",
        retry_after_s=1,
    )


def bad_gateway(role: str, cause: str) -> Failure:
    return Failure(502, "BadGatewayError", f"The {role} worker failed: {cause}.", outcome=f"{role}_{cause}")


def timed_out(role: str, phase: str) -> Failure:
    return Failure(
        504,
        "GatewayTimeoutError",
        f"The {role} worker did not answer in time ({phase}).",
        outcome=f"{role}_{phase}_timeout",
    )
