"""A request's way from prefill to decode, from its lease on P to the end of D's answer. Parses no client HTTP.

Every way out of here ends the leases and the hand-off; what cannot be answered leaves as Failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eldrd.handoff import fanout
from eldrd.handoff.answer import Answer
from eldrd.handoff.decode import decode
from eldrd.handoff.prefill import prefill
from eldrd.handoff.release import Releaser
from eldrd.handoff.way import PrefillAgainError, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from eldrd.fleet.pool import IdleWatch
    from eldrd.fleet.table import LoadTable
    from eldrd.handoff.answer import Client
    from eldrd.handoff.ledger import Ledger
    from eldrd.handoff.request import Record, Request
    from eldrd.handoff.snapshot import Snapshot
    from eldrd.signatures.receiver import Signature, SignatureReceiver
    from eldrd.telemetry.metrics import Metrics


class Lifecycle:
    """Serves requests over the workers of a Snapshot."""

    def __init__(
        self,
        table: LoadTable,
        ledger: Ledger,
        receiver: SignatureReceiver,
        watch: IdleWatch,
        metrics: Metrics,
        captured: Callable[[Signature, int, str | None], None],
        observed: Callable[[Signature], None] | None = None,
        current: Callable[[], Snapshot] | None = None,
    ) -> None:
        """captured: given each whole signature with its output length and label when a capture is on;
        observed: given each signature before its request is decided; current: the newest Snapshot, for requests whose own
        has no usable worker left."""
        self.table = table
        self.ledger = ledger
        self.receiver = receiver
        self.watch = watch
        self.metrics = metrics
        self.captured = captured
        self.observed = observed
        self.current = current
        self.releaser = Releaser(ledger)

    def serve(
        self, request: Request, snapshot: Snapshot, client: Client, record: Record
    ) -> Coroutine[Any, Any, Answer]:
        """Prefill, decide, decode, relay. Raises Failure; cancelled when the client goes away."""

        def one(request: Request, client: Client, record: Record) -> Coroutine[Any, Any, Answer]:
            return _walk(Way(self, request, snapshot, client, record))

        if request.single:
            return one(request, client, record)
        return fanout.serve(request, client, record, one)


async def _walk(way: Way) -> Answer:
    life = way.life
    while True:
        outcome = await prefill(way)
        if isinstance(outcome, Answer):
            return outcome
        try:
            if way.wants_signature:
                way.signed(life.receiver.ready(outcome.id) or await way.late_signature(outcome.id))
                life.receiver.forget(outcome.id)
            return await decode(way, outcome)
        except PrefillAgainError:
            continue
        finally:
            if not outcome.given:
                life.releaser.release(outcome, way.snap)
            elif not outcome.releasing:
                outcome.end("lost")
            life.receiver.forget(outcome.id)
