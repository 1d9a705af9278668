"""The bytes of an emulated worker's connection, where faults cut, split, delay or hold them. Knows no HTTP.

``serve`` puts a Wire between aiohttp's connection handler and the socket; a request handler finds it as its transport.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from loadgen.fleet.faults import Faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.fleet.faults import Cut

_NONE = Faults()
# Sends leave the process at the end of a loop turn (uvloop); a connection that ends must let them.
_FLUSH_S = 0.002
_RST = struct.pack("ii", 1, 0)


class Wire(asyncio.Transport):
    """A transport under faults. requests: how many requests have armed it, the present one included."""

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self.requests = 0
        self._inner = inner
        self._faults = _NONE
        self._sent = 0
        self._pieces: deque[bytes] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._ended = False

    def arm(self, faults: Faults) -> None:
        """A request has arrived: its answer's bytes, counted from here, meet these faults."""
        self.requests += 1
        self._faults = faults
        self._sent = 0

    def cut(self, how: Cut) -> None:
        """End the connection once what has been sent is out."""
        if not self._ended:
            self._ended = True
            self._end_by(how)

    def _end_by(self, how: Cut) -> None:
        asyncio.get_running_loop().call_later(_FLUSH_S, self._reset if how == "reset" else self._inner.close)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        faults = self._faults
        if self._ended:
            return
        if not faults.on_the_wire:
            self._inner.write(data)
            return
        limits = [at for at in (faults.cut_at, faults.stall_at) if at is not None]
        room = min(limits) - self._sent if limits else len(data)
        part = bytes(data[: max(0, room)])
        self._sent += len(part)
        size = faults.split or max(1, len(part))
        self._pieces.extend(part[i : i + size] for i in range(0, len(part), size))
        if faults.cut_at is not None and self._sent >= faults.cut_at:
            self._ended = True
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._send())

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    async def _send(self) -> None:
        faults = self._faults
        while self._pieces:
            if faults.pause_s:
                await asyncio.sleep(faults.pause_s)
            if self._inner.is_closing():
                self._pieces.clear()
                break
            self._inner.write(self._pieces.popleft())
            await asyncio.sleep(0)
        self._pump = None
        if self._ended:
            self._end_by(faults.cut)

    def _reset(self) -> None:
        sock = self._inner.get_extra_info("socket")
        if sock is not None and not self._inner.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        self._inner.abort()

    def lost(self) -> None:
        """The connection is gone."""
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None

    def close(self) -> None:
        """As the handler wishes, but a cut ends the connection in its own way, and one that stalls stays open."""
        stall_at = self._faults.stall_at
        if self._ended or (stall_at is not None and self._sent >= stall_at):
            return
        if self._pump is not None:
            self._pump.add_done_callback(lambda _: self.close())
        else:
            self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._inner.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._inner.set_write_buffer_limits(high, low)


class _Wired(asyncio.Protocol):
    """Hands a connection's events to the protocol behind it, with a Wire for its transport."""

    def __init__(self, behind: asyncio.Protocol, wires: set[Wire]) -> None:
        self._behind = behind
        self._wires = wires
        self._wire: Wire | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._wire = Wire(cast("asyncio.Transport", transport))
        self._wires.add(self._wire)
        self._behind.connection_made(self._wire)

    def data_received(self, data: bytes) -> None:
        self._behind.data_received(data)

    def eof_received(self) -> bool | None:
        return self._behind.eof_received()

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._wire is not None:
            self._wire.lost()
            self._wires.discard(self._wire)
        self._behind.connection_lost(exc)


async def serve(make: Callable[[], asyncio.Protocol], wires: set[Wire], host: str, port: int) -> asyncio.Server:
    """Listen; each connection gets a protocol of ``make`` behind a Wire, which is in ``wires`` while it lives."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Wired(make(), wires), host, port, reuse_address=True)
