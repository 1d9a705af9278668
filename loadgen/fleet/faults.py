"""Faults that a test or chaos run can set on an emulated worker; consulted at fixed points of a request. No logic here."""

from __future__ import annotations

from typing import Literal

import msgspec

Cut = Literal["reset", "close"]


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """All off by default; may be changed at any time and hold for requests that arrive afterwards.

    Before the engine: delay_s: wait this long with the request in hand; refuse: end the connection without an answer;
    drop_reused: the same, but only on a connection that has served a request before (the keep-alive race); status: answer
    generation requests with this HTTP status and an error object; health_status: what /health answers.

    The answer's content: drop_params: P answers without kv_transfer_params; wrong_params: P names a hand-off that does not
    exist; finish_first: the first token ends the answer, as an end-of-text token does; first_text: the text of the first
    token (of any size or content); gzip: the body is compressed.

    The answer's bytes, counted from the status line on: cut_at: the connection ends after so many; stall_at: nothing
    comes after so many; split: each send carries at most so many; pause_s: wait before each send; chunk: bytes of the
    stream in one HTTP chunk; die_after_chunks: the connection ends after so many SSE events of a stream, with die_inside
    in the middle of the next HTTP chunk. cut: how connections end, by ``reset`` (RST) or ``close`` (FIN).
    """

    delay_s: float = 0.0
    refuse: bool = False
    drop_reused: bool = False
    status: int | None = None
    health_status: int = 200
    drop_params: bool = False
    wrong_params: bool = False
    finish_first: bool = False
    first_text: str | None = None
    gzip: bool = False
    cut_at: int | None = None
    stall_at: int | None = None
    split: int = 0
    pause_s: float = 0.0
    chunk: int = 0
    die_after_chunks: int | None = None
    die_inside: bool = False
    cut: Cut = "reset"

    @property
    def on_the_wire(self) -> bool:
        """Whether the answer's bytes are interfered with."""
        return self.cut_at is not None or self.stall_at is not None or bool(self.split) or self.pause_s > 0
