"""The state of one request while it is served, which its legs share. Sends nothing."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from eldrd.fleet import vllm
from eldrd.handoff.failure import no_worker
from eldrd.handoff.retry import Retries, answered

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from eldrd.fleet.table import Pool
    from eldrd.fleet.worker import Worker
    from eldrd.handoff.answer import Client
    from eldrd.handoff.lifecycle import Lifecycle
    from eldrd.handoff.request import Record, Request
    from eldrd.handoff.snapshot import Snapshot
    from eldrd.signatures.receiver import Signature


class PrefillAgainError(Exception):
    """The hand-off cannot be used (any more): the prompt must be prefilled once more."""


class Way:
    """attempt: prefills so far; snap: what the request is served with; signature: as soon as it is here, and as long as
    anybody needs it; wants_signature: whether somebody does."""

    __slots__ = (
        "_retries",
        "attempt",
        "client",
        "life",
        "record",
        "request",
        "signature",
        "snap",
        "wants_signature",
    )

    def __init__(self, life: Lifecycle, request: Request, snap: Snapshot, client: Client, record: Record) -> None:
        self.life = life
        self.request = request
        self.snap = snap
        self.client = client
        self.record = record
        self.attempt = 0
        self._retries: Retries | None = None
        self.signature: Signature | None = None
        self.wants_signature = snap.decode_policy.wants_signature or bool(snap.settings.capture.dir)

    @property
    def retries(self) -> Retries:
        """Most requests have none."""
        if self._retries is None:
            self._retries = Retries(self.snap.settings, self.life.metrics, self.record)
        return self._retries

    def usable(self, pool: Pool) -> NDArray[np.bool_]:
        """bool [W]: the pool's usable workers that have not failed this request."""
        return pool.usable() if self._retries is None else self._retries.usable(pool)

    def answered(self, worker: Worker, status: int) -> None:
        """Tell the breaker of an answer."""
        answered(worker, status, self.snap.settings.health)

    async def late_signature(self, eldr_id: str) -> Signature | None:
        return await self.life.receiver.wait(eldr_id, self.snap.settings.signatures.wait_ms / 1e3)

    def signed(self, signature: Signature | None) -> None:
        life, record = self.life, self.record
        self.signature = signature
        life.metrics.signature_wait.observe(monotonic() - record.prefilled)
        if signature is None:
            record.signature = "missing"
            return
        record.signature = signature.state
        if life.observed is not None:
            life.observed(signature)

    def move_on(self, role: str) -> None:
        """No worker of this role is left: if a reload has brought others since, go on with them. Raises Failure."""
        newest = self.snap if self.life.current is None else self.life.current()
        if newest is self.snap:
            raise no_worker(role)
        self.snap = newest

    def post(self, worker: Worker, id_: str, parts: list[Any]) -> list[Any]:
        """A request for one worker, head first."""
        headers = self.request.passed_headers + self.snap.worker_headers
        head = vllm.post(self.request.path, worker.pool.netloc, id_, sum(map(len, parts)), headers)
        return [head, *parts]
