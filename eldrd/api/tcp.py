"""What TCP knows and can do that asyncio's transports do not show. No protocol above it."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

_NO_LINGER: Final = struct.pack("ii", 1, 0)
_ESTABLISHED: Final = 1


def peer_is_there(transport: asyncio.Transport) -> bool:
    """Whether the peer's sending side is open. Where reading has stopped, an end behind unread bytes is seen only so."""
    if transport.is_closing():
        return True
    sock = transport.get_extra_info("socket")
    return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED)


def reset(transport: asyncio.Transport) -> None:
    """Abort so that the peer sees an error, no end."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
