"""What a request's way ends in, and the client's side of it as an interface. No transport is touched here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from eldrd.fleet.framing import BodyTracker, Head


class Flow(Protocol):
    """What a client that reads slowly holds back."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Client(Protocol):
    """The client's side of a relay, implemented by api."""

    def can_relay(self, tracker: BodyTracker) -> bool:
        """Whether the worker's framing can pass to this client as it is."""

    def start(
        self, head: Head, tracker: BodyTracker, extra: tuple[bytes, bytes] | None, body: bytes = b""
    ) -> Callable[[bytes], object]:
        """Write the worker's head, with one more field if there is one, and what there is of its body; what takes further
        bytes. Raises ConnectionError if the client is gone."""

    def attach(self, flow: Flow) -> None:
        """Couple flow control: a client that reads slowly pauses ``flow``."""

    def detach(self) -> None:
        """The relay is over."""

    def fail(self, message: str, *, whole_events: bool) -> None:
        """The worker was lost in the middle: end the client's stream so that it cannot be taken for complete.
        whole_events: what has been written ends with a whole event in plain text."""


class Answer(NamedTuple):
    """A whole answer, to be sent as it is. relayed: it has been written already; ``complete`` says whether all of it."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]]
    relayed: bool = False
    complete: bool = True
