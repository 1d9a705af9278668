"""TCP ports for servers on loopback that bind them later, or again. Binds nothing itself."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ephemeral range: a server binds its port later, or once more after a restart, and no outgoing connection may
# take it meanwhile.
_PORTS = range(20_000, 32_000)
_given: set[int] = set()


def free_port() -> int:
    """A TCP port on loopback that is free now and that this process has not been given before. Raises OSError if there is
    none."""
    for port in random.sample(_PORTS, 4_000):
        if port in _given:
            continue
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise OSError(f"no free TCP port between {_PORTS.start} and {_PORTS.stop}")
