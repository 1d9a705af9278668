"""One vLLM server as eldrd knows it: identity, probe state, breaker, connections. Sends no request by itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from eldrd.fleet.pool import ConnectionPool

if TYPE_CHECKING:
    from eldrd.fleet.table import LoadTable

Role = Literal["prefill", "decode"]


class Worker:
    """role, name, url: who it is; label: the name as a header has it. up: the last probe's answer. cards: its /v1/models
    entries. opened: how often its breaker opened. met: the prefill engines whose KV it has read, since it was last down.
    A worker is usable while it is up and its breaker is closed."""

    def __init__(self, table: LoadTable, role: Role, name: str, url: str, connect_timeout_s: float) -> None:
        self.role: Role = role
        self.name = name
        self.label = name.encode()
        self.url = url
        self.pool = ConnectionPool(url, connect_timeout_s)
        self.removed = False
        self.up = False
        self._cards: tuple[dict[str, Any], ...] = ()
        self.opened = 0
        self.met: set[str] = set()
        self._table = table
        self._probe_failures = 0
        self._failures = 0
        self._open_until = 0.0
        self.slot = table.add()

    @property
    def cards(self) -> tuple[dict[str, Any], ...]:
        return self._cards

    @cards.setter
    def cards(self, cards: tuple[dict[str, Any], ...]) -> None:
        self._cards = cards
        self._table.revision += 1

    @property
    def usable(self) -> bool:
        return bool(self._table.usable[self.slot]) and not self.removed

    def _set_usable(self) -> None:
        if not self.removed:
            self._table.usable[self.slot] = self.up and self._open_until == 0.0

    def probed(self, ok: bool, failures: int) -> None:
        """Take a probe's result; ``failures`` bad ones in a row take the worker out, one good one brings it back."""
        if ok:
            self._probe_failures = 0
            self.up = True
        else:
            self._probe_failures += 1
            if self._probe_failures >= failures:
                self.up = False
                self.met.clear()
                self.pool.close_idle()
        if self._open_until and time.monotonic() >= self._open_until:
            self._open_until = 0.0
            self._failures = 0
        self._set_usable()

    def succeeded(self) -> None:
        """A request was answered, with whatever status below 500."""
        self._failures = 0

    def failed(self, failures: int, open_s: float, *, unreachable: bool) -> None:
        """A request met a 5xx, a refused or lost connection or a timeout; ``failures`` in a row open the breaker, a
        refused connection does at once, until a probe after ``open_s`` seconds."""
        self._failures += 1
        if unreachable or self._failures >= failures:
            if self._open_until == 0.0:
                self.opened += 1
            self._open_until = time.monotonic() + open_s
            self._set_usable()
