"""Faults that a test or demo can set on an emulated worker; consulted at fixed points of a request. No logic here."""

from __future__ import annotations

import msgspec


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """All off by default; may be changed at any time and hold for requests that reach the point afterwards.

    refuse: close the connection without an answer; status: answer generation requests with this HTTP status and an
    error object; health_status: what /health answers; delay_s: wait this long before a request is looked at;
    drop_params: P answers without kv_transfer_params; wrong_params: P names a hand-off that does not exist;
    die_after_chunks: break the connection after this many SSE events of a stream.
    """

    refuse: bool = False
    status: int | None = None
    health_status: int = 200
    delay_s: float = 0.0
    drop_params: bool = False
    wrong_params: bool = False
    die_after_chunks: int | None = None
