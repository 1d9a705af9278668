"""The ledger of hand-offs: KV that a prefill worker holds for a decode worker. Every entry ends once, as one outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# consumed: a decode worker took it; released: given back on purpose; expired: too old to be used; lost: nobody will fetch
# it and the prefill worker frees it when its lease ends.
Outcome = Literal["consumed", "released", "expired", "lost"]
OUTCOMES: tuple[Outcome, ...] = ("consumed", "released", "expired", "lost")


class HandOff:
    """Transfer params of one finished prefill. opened: time.monotonic of the prefill's answer; given: a decode worker has been
    sent them and may be reading the blocks; releasing: it is being given back."""

    __slots__ = ("_ledger", "given", "id", "opened", "outcome", "params", "prefill", "releasing")

    def __init__(self, ledger: Ledger, id_: str, prefill: str, params: dict[str, Any], opened: float) -> None:
        self._ledger = ledger
        self.id = id_
        self.prefill = prefill
        self.params = params
        self.opened = opened
        self.given = False
        self.releasing = False
        self.outcome: Outcome | None = None

    @property
    def engine(self) -> str:
        """The id of the engine that holds the blocks, another one after each restart; empty where none is given."""
        engine = self.params.get("remote_engine_id")
        return engine if type(engine) is str else ""

    def end(self, outcome: Outcome) -> None:
        """The first outcome given counts; later ones change nothing."""
        if self.outcome is None:
            self.outcome = outcome
            self._ledger._ended(self)


class Ledger:
    """Open hand-offs by request id; ``counted`` is told each outcome."""

    def __init__(self, counted: Callable[[Outcome], None]) -> None:
        self._open: dict[str, HandOff] = {}
        self._counted = counted

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[HandOff]:
        return iter(list(self._open.values()))

    def open(self, id_: str, prefill: str, params: dict[str, Any], now: float) -> HandOff:
        entry = HandOff(self, id_, prefill, params, now)
        self._open[id_] = entry
        return entry

    def _ended(self, entry: HandOff) -> None:
        assert entry.outcome is not None
        self._open.pop(entry.id, None)
        self._counted(entry.outcome)
