"""How many requests are served at once, and how many may wait for that. Knows no worker and no request."""

from __future__ import annotations

import asyncio
import collections

from eldrd.handoff.failure import Failure


def queue_full() -> Failure:
    return Failure(429, "TooManyRequestsError", "Too many requests are waiting.", outcome="queue_full", retry_after_s=1)


class Admission:
    """First come, first served. limit: requests at once, 0 for any number; queue: how many more may wait.

    running, waiting: how many are. ``configure`` changes the limits.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.queue = 0
        self.running = 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    def configure(self, limit: int, queue: int) -> None:
        """Change the limits; those who wait get the places that this makes free."""
        self.limit, self.queue = limit, queue
        self._next()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def try_enter(self) -> bool:
        """Take a place if one is free; whoever gets one must ``leave``."""
        if self.limit and (self.running >= self.limit or self._waiting):
            return False
        self.running += 1
        return True

    async def enter(self) -> None:
        """Wait for a place, as ``try_enter``. Raises Failure(429) if as many as may wait do so already."""
        if not self.try_enter():
            await self._wait()

    def leave(self) -> None:
        self.running -= 1
        self._next()

    async def _wait(self) -> None:
        if len(self._waiting) >= self.queue:
            raise queue_full()
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # The place was given in the very moment that its owner left.
                self.running -= 1
                self._next()
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    def _next(self) -> None:
        while self._waiting and (not self.limit or self.running < self.limit):
            place = self._waiting.popleft()
            if not place.done():
                # Counted here, so that nobody who comes in between takes the place.
                self.running += 1
                place.set_result(None)
