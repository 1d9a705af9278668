"""Who may use eldrd: client keys from a file, compared by their hashes. No key is ever logged, echoed or passed on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from eldrd.handoff.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

# Probes and scrapers carry no keys.
OPEN_PATHS: Final = frozenset(("/health", "/ready", "/metrics"))


def digests(keys: tuple[str, ...]) -> frozenset[bytes]:
    """What is kept of the keys."""
    return frozenset(hashlib.sha256(key.encode()).digest() for key in keys)


def check(path: str, headers: Mapping[str, str], keys: frozenset[bytes]) -> None:
    """Pass, or raise Failure(401). Looking a hash up tells nothing about the keys by its duration. No keys: all may.

    headers: looked up by lower-case names."""
    if not keys or path in OPEN_PATHS:
        return
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or hashlib.sha256(key.strip().encode("utf-8", "replace")).digest() not in keys:
        raise Failure(
            401, "AuthenticationError", "A valid API key is required (Authorization: Bearer).", outcome="no_key"
        )
