"""What operators read: readiness, models, status, open hand-offs. Reads the daemon's state, changes nothing."""

from __future__ import annotations

import time
from time import monotonic
from typing import TYPE_CHECKING, Any

from eldrd import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from eldrd.fleet.table import LoadTable, Pool
    from eldrd.handoff.ledger import Ledger
    from eldrd.handoff.snapshot import Snapshot
    from eldrd.signatures.cache import SignatureCache
    from eldrd.signatures.receiver import SignatureReceiver


class Admin:
    """Answers of the read-only paths, as objects to be serialised."""

    def __init__(
        self,
        current: Callable[[], Snapshot],
        table: LoadTable,
        ledger: Ledger,
        receiver: SignatureReceiver,
        cache: SignatureCache,
    ) -> None:
        self._current = current
        self._table = table
        self._ledger = ledger
        self._receiver = receiver
        self._cache = cache
        self._started = time.time()
        self.draining = False
        self._names: tuple[frozenset[str], dict[str, str]] | None = None
        self._names_of: tuple[Snapshot | None, int] = (None, 0)

    def not_ready(self) -> str | None:
        """Why no request can be served now; None if one can."""
        snapshot = self._current()
        if self.draining:
            return "eldrd is draining."
        for pool, role in ((snapshot.prefill, "prefill"), (snapshot.decode, "decode")):
            if not pool.any_usable():
                return f"No {role} worker is available."
        return None

    def cards(self) -> list[dict[str, Any]]:
        """The workers' model cards, one a model name; a name in [[models]] but known to no worker gets a bare one."""
        snapshot = self._current()
        cards: dict[str, dict[str, Any]] = {}
        for worker in (*snapshot.decode.workers, *snapshot.prefill.workers):
            for card in worker.cards:
                cards.setdefault(card["id"], card)
        if not snapshot.settings.models:
            return list(cards.values())
        bare = {"object": "model", "created": int(self._started), "owned_by": "vllm"}
        return [
            {**cards.get(model.name, bare), "id": name}
            for model in snapshot.settings.models
            for name in (model.name, *model.aliases)
        ]

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": self.cards()}

    def names(self) -> tuple[frozenset[str], dict[str, str]]:
        """Names that clients may ask for, none while nothing is known, which lets the workers judge; and the worker's name
        behind each alias."""
        snapshot, revision = self._current(), self._table.revision
        if self._names is None or self._names_of[0] is not snapshot or self._names_of[1] != revision:
            models = snapshot.settings.models
            workers = (*snapshot.decode.workers, *snapshot.prefill.workers)
            names = [m.name for m in models] or [card["id"] for w in workers for card in w.cards]
            self._names = frozenset(names), {alias: m.name for m in models for alias in m.aliases}
            self._names_of = (snapshot, revision)
        return self._names

    def status(self) -> dict[str, Any]:
        snapshot = self._current()
        partition = snapshot.partition
        return {
            "version": __version__,
            "uptime_s": round(time.time() - self._started, 1),
            "generation": snapshot.generation,
            "ready": self.not_ready() is None,
            "policy": snapshot.decode_policy.name,
            "partition": partition
            and {
                "workers": list(partition.workers),
                "fingerprint": f"{partition.fingerprint:016x}",
                "requests": partition.requests,
                "created": partition.created,
            },
            "prefill": self._workers(snapshot.prefill),
            "decode": self._workers(snapshot.decode),
            "handoffs_open": len(self._ledger),
            "signature_cache": {"rows": len(self._cache), "capacity": self._cache.capacity},
            "hooks": [
                {
                    "worker": h.worker,
                    "phase": h.phase,
                    "model": h.model,
                    "hook": h.hook,
                    "decode_steps": self._receiver.steps.status(h.worker),
                }
                for h in self._receiver.hooks
            ],
        }

    def _workers(self, pool: Pool) -> list[dict[str, Any]]:
        return [
            {
                "name": w.name,
                "url": w.url,
                "usable": w.usable,
                "up": w.up,
                "in_flight": int(self._table.in_flight[w.slot]),
            }
            for w in pool.workers
        ]

    def handoffs(self) -> dict[str, Any]:
        now = monotonic()
        return {
            "open": [{"id": h.id, "prefill": h.prefill, "age_s": round(now - h.opened, 3)} for h in self._ledger],
        }
