"""Cross-origin calls from browsers, where the configuration names origins (Fetch standard, CORS protocol). Headers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFLIGHT: Final = (
    (b"access-control-allow-methods", b"GET, POST"),
    # OpenAI's client in a browser sends a dozen of its own (x-stainless-...); the star does not stand for authorization.
    (b"access-control-allow-headers", b"authorization, *"),
    (b"access-control-max-age", b"600"),
)
_EXPOSED: Final = (b"access-control-expose-headers", b"x-request-id, x-eldrd-decode")


def headers(request: Mapping[str, str], origins: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """The headers that let the request's origin read the answer; none where it may not, or does not ask. request: its
    headers, looked up by lower-case names."""
    if not origins:
        return []
    origin = request.get("origin")
    if origin is None or not origin.isascii() or not origin.isprintable():
        return []
    if "*" in origins:
        return [(b"access-control-allow-origin", b"*"), _EXPOSED]
    if origin in origins:
        return [(b"access-control-allow-origin", origin.encode()), (b"vary", b"origin"), _EXPOSED]
    return []
