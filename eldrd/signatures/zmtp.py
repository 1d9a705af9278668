"""ZMTP 3.x on the loop: the ROUTER's side of the hooks' connections, as one asyncio protocol. Knows frames, not what is in
them: no headers, counts or metrics.

Sources: ZMTP 3.0 and 3.1 (https://rfc.zeromq.org/spec/23/, https://rfc.zeromq.org/spec/37/), NULL mechanism. libzmq would
receive on a thread of its own and wake the loop for every message; here a message that one read holds is cut out of it.

A connection is its peer's identity: the Identity that a peer may name itself has no use here. A message to a peer that has
gone, or does not read, is dropped. Dead hosts are found by TCP keepalive, so the time-to-live of a PING is not looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Frame = bytes | bytearray

# A hook's largest message is 256 rows: 16 MiB for 64 layers of 512 experts in two bytes.
MESSAGE_BYTES: Final = 32 << 20
# No message of the hooks has more than three.
_FRAMES: Final = 8
_COMMAND_BYTES: Final = 4096
_PING_CONTEXT: Final = 16
_UNSENT_BYTES: Final = 8 << 20
_HANDSHAKE_S: Final = 30.0
# What one turn of the loop takes of a connection: so many messages, or one read of this size.
_TURN_MESSAGES: Final = 64
_TURN_BYTES: Final = 128 << 10
_BACKLOG: Final = 1024

_MORE, _LONG, _COMMAND = 1, 2, 4
_FLAGS: Final = frozenset({0, _MORE, _LONG, _MORE | _LONG, _COMMAND, _COMMAND | _LONG})
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"


class Connection(asyncio.Protocol):
    """One peer. told: whether its first mistake has been logged; for the one who logs."""

    def __init__(self, listener: Listener) -> None:
        self.told = False
        self._listener = listener
        self._received = listener.received
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._greeted = self._ready = False
        # Bytes not yet looked at: of the greeting, of a frame's first nine, or those that a busy turn left over.
        self._rest = b""
        self._next_turn: asyncio.Handle | None = None
        self._paused = False
        # The message in parts, and how many bytes it may still have.
        self._frames: list[Frame] = []
        self._room = MESSAGE_BYTES
        # A frame that is longer than what was read: its flags, and how much of it is here.
        self._long: bytearray | None = None
        self._view = memoryview(b"")
        self._long_flags = self._filled = 0

    @property
    def address(self) -> str:
        """Where the peer is; empty for a local socket."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if isinstance(name, tuple) else ""

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send a message; False where it was dropped, because the peer is gone or does not read."""
        last = len(frames) - 1
        return self._write(b"".join(_frame(f, _MORE if i < last else 0) for i, f in enumerate(frames)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._listener.connections.add(self)
        self._deadline = self._loop.call_later(_HANDSHAKE_S, self._refuse, "no handshake")
        self._write(_GREETING)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._listener.connections.discard(self)
        self._transport = None
        for handle in (self._deadline, self._next_turn):
            if handle is not None:
                handle.cancel()
        self._frames, self._long, self._rest = [], None, b""

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if self._next_turn is not None:
            self._rest = data
            return
        if not self._greeted:
            data = self._greet(data)
            if not self._greeted:
                return
        self._take(data)
        if len(data) >= _TURN_BYTES:
            self._pause()

    # -- parsing --------------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        """Cut frames out of what was read, up to a turn's share."""
        at = self._go_on(data) if self._long is not None else 0
        end = len(data)
        messages = 0
        while at < end and self._transport is not None:
            flags = data[at]
            body = at + (9 if flags & _LONG else 2)
            if body > end:
                break
            size = int.from_bytes(data[at + 1 : body], "big")
            if size > self._room or flags not in _FLAGS:
                self._refuse(f"flags {flags}, {size} bytes")
                return
            at = body + size
            if at > end:
                self._begin(flags, size, data, body)
                return
            if flags & _MORE and len(self._frames) < _FRAMES and self._ready:
                self._room -= size
                self._frames.append(data[body:at])
                continue
            self._frame(flags, data[body:at])
            messages += 1
            if messages == _TURN_MESSAGES:
                self._pause()
                break
        self._rest = data[at:]

    def _begin(self, flags: int, size: int, data: bytes, body: int) -> None:
        if size > _COMMAND_BYTES and (flags & _COMMAND or not self._ready):
            self._refuse(f"a command of {size} bytes")
            return
        self._long_flags, self._long = flags, bytearray(size)
        self._filled = len(data) - body
        # Assigning to a slice of the bytearray itself would copy twice.
        self._view = memoryview(self._long)
        self._view[: self._filled] = memoryview(data)[body:]

    def _go_on(self, data: bytes) -> int:
        """Fill the frame that is longer than what was read; how much of ``data`` it took."""
        long = self._long
        assert long is not None
        n = min(len(long) - self._filled, len(data))
        self._view[self._filled : self._filled + n] = memoryview(data)[:n]
        self._filled += n
        if self._filled == len(long):
            self._long, self._view = None, memoryview(b"")
            self._frame(self._long_flags, long)
        return n

    def _frame(self, flags: int, frame: Frame) -> None:
        """A whole frame: any but those that ``_take`` deals with itself."""
        if flags & _COMMAND:
            self._command(bytes(frame))
        elif not self._ready:
            self._refuse("a message before READY")
        elif len(self._frames) == _FRAMES:
            self._refuse(f"a message of more than {_FRAMES} frames")
        elif flags & _MORE:
            self._room -= len(frame)
            self._frames.append(frame)
        else:
            frames, self._frames = self._frames, []
            self._room = MESSAGE_BYTES
            frames.append(frame)
            self._received(self, frames)

    def _greet(self, data: bytes) -> bytes:
        """Check the greeting as far as it is here; what follows it."""
        if data[:1] not in (b"", b"\xff") or (len(data) > 9 and data[9] != 0x7F):
            self._refuse("no ZMTP greeting")
        elif len(data) > 10 and data[10] < 3:
            self._refuse(f"ZMTP {data[10]}, this side speaks 3")
        elif len(data) < len(_GREETING):
            self._rest = data
        elif data[12:32] != _GREETING[12:32]:
            self._refuse("a mechanism other than NULL")
        else:
            self._greeted = True
            return data[len(_GREETING) :]
        return b""

    def _command(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if not self._ready:
            self._shake(name, rest)
        elif name == b"PING":
            if not 2 <= len(rest) <= 2 + _PING_CONTEXT:
                self._refuse("a PING of another length")
            self._write(_frame(b"\x04PONG" + rest[2:], _COMMAND))
        elif name == b"ERROR":
            self._refuse("ERROR")
        # Any other command has nothing for a ROUTER: PONG, SUBSCRIBE, CANCEL, and those of later versions.

    def _shake(self, name: bytes, rest: bytes) -> None:
        if name != b"READY":
            self._refuse("the first command is not READY")
            return
        try:
            kind = _properties(rest).get(b"socket-type")
        except (IndexError, struct.error):
            self._refuse("READY with properties cut short")
            return
        if kind != b"DEALER":
            reason = b"Socket-Type is not DEALER"
            self._write(_frame(b"\x05ERROR" + bytes([len(reason)]) + reason, _COMMAND))
            self._refuse(reason.decode())
            return
        self._ready = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._write(_frame(_READY, _COMMAND))

    # -- the transport --------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > _UNSENT_BYTES:
            return False
        transport.write(data)
        return True

    def _refuse(self, problem: str) -> None:
        transport = self._transport
        if transport is None:
            return
        self._listener.refused(self, problem)
        self._transport = None
        if transport.get_write_buffer_size() > _COMMAND_BYTES:
            transport.abort()
        else:
            transport.close()

    def _pause(self) -> None:
        """Let the loop do something else before more is taken."""
        if self._transport is not None and self._next_turn is None:
            if not self._paused:
                self._paused = True
                self._transport.pause_reading()
            self._next_turn = self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._next_turn = None
        data, self._rest = self._rest, b""
        self._take(data)
        if self._next_turn is None and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()


class Listener:
    """The socket that hooks connect to.

    received: gets each message and the connection it came over; refused: is told of a peer that keeps to no protocol, and
    why, before it is disconnected.
    """

    def __init__(
        self, received: Callable[[Connection, list[Frame]], None], refused: Callable[[Connection, str], None]
    ) -> None:
        self.received = received
        self.refused = refused
        self.connections: set[Connection] = set()
        self._path = ""
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self, endpoint: str) -> str:
        """Listen at ``tcp://address:port`` (``*``: all addresses, any free port; IPv6 in brackets) or ``ipc://path`` from
        now on, in the running loop; the endpoint as bound. Raises OSError."""
        kind, _, place = endpoint.partition("://")
        try:
            if kind == "ipc":
                self._socket = _bind_path(place)
                self._path = place
                bound = endpoint
            else:
                host, _, port = place.rpartition(":")
                self._socket = _bind_address(host.strip("[]"), 0 if port == "*" else int(port))
                at = self._socket.getsockname()
                bound = f"tcp://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}"
        except (OSError, OverflowError, ValueError) as e:
            raise OSError(getattr(e, "errno", errno.EINVAL), f"{endpoint}: {getattr(e, 'strerror', e)}") from None
        # Peers that connect before the task has run wait in the backlog.
        self._starting = asyncio.get_running_loop().create_task(self._serve(self._socket))
        return bound

    async def _serve(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        serve = loop.create_unix_server if bound.family == socket.AF_UNIX else loop.create_server
        self._server = await serve(lambda: Connection(self), sock=bound, backlog=_BACKLOG)

    def close(self) -> None:
        """Stop listening and disconnect everyone."""
        if self._starting is not None:
            self._starting.cancel()
        if self._server is not None:
            self._server.close()
        elif self._socket is not None:
            self._socket.close()
        for connection in list(self.connections):
            connection.close()
        if self._socket is not None and self._path and not self._path.startswith("@"):
            with contextlib.suppress(OSError):
                Path(self._path).unlink()
        self._server = self._socket = None


def _bind_address(host: str, port: int) -> socket.socket:
    if port > 65_535:
        raise OverflowError("no such port")
    if host == "*":
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        bound = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    else:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.create_server(address, family=family, backlog=_BACKLOG)
    # Accepted sockets inherit these.
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        bound.setsockopt(level, option, value)
    return bound


def _bind_path(path: str) -> socket.socket:
    """A local socket; ``@name`` is abstract. One that a process left behind is replaced, one that is listened to is not."""
    name = "\0" + path[1:] if path.startswith("@") else path
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            bound.bind(name)
        except OSError as e:
            if e.errno != errno.EADDRINUSE or not _left_behind(name):
                raise
            Path(name).unlink()
            bound.bind(name)
        bound.listen(_BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


def _left_behind(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(name) == errno.ECONNREFUSED


def _frame(body: Frame, flags: int) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | _LONG, len(body)) + body
    return bytes((flags, len(body))) + body


def _properties(data: bytes) -> dict[bytes, bytes]:
    """The metadata of READY, names in lower case. Raises IndexError or struct.error where it is cut short."""
    found = {}
    at = 0
    while at < len(data):
        value = at + 1 + data[at] + 4
        (size,) = struct.unpack_from(">I", data, value - 4)
        if value + size > len(data):
            raise IndexError
        found[data[at + 1 : value - 4].lower()] = data[value : value + size]
        at = value + size
    return found
