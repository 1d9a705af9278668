"""What systemd, or whoever else runs the daemon, is told (sd_notify), and signals that come early."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from daemon import Daemon
from stage import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from loadgen.fleet.emulated import EmulatedFleet


class Manager:
    """The service manager's end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        self._told: list[dict[str, str]] = []

    def told(self) -> list[dict[str, str]]:
        """Every message so far."""
        while True:
            try:
                lines = self._socket.recv(65536).decode().splitlines()
            except BlockingIOError:
                return self._told
            self._told.append(dict(line.split("=", 1) for line in lines))

    def status(self) -> str:
        return [m["STATUS"] for m in self.told() if "STATUS" in m][-1]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    yield manager
    manager.close()


@pytest.fixture
def daemon(manager: Manager, fleet: EmulatedFleet, tmp_path: Path) -> Daemon:
    """Not started."""
    listed = fleet.describe()
    return Daemon(tmp_path, listed["prefill"], listed["decode"])


async def test_the_service_manager_is_told_of_start_reload_and_stop(daemon: Daemon, manager: Manager) -> None:
    await daemon.start()
    well = f"listening on 127.0.0.1:{daemon.port}, policy"
    try:
        await until(lambda: sum("WATCHDOG" in m for m in manager.told()) > 1)
        assert manager.status() == f"{well} jsq"
        await daemon.reload(decode={"policy": "elder"})
        failed = f"{well} jsq; the last reload failed: {daemon.config}: decode.policy = 'elder'"
        await until(lambda: manager.status().startswith(failed))
        await daemon.reload(decode={"policy": "p2c"})
        await until(lambda: manager.status() == f"{well} p2c")
    finally:
        assert await daemon.stop() == 0
    told = [m for m in manager.told() if "WATCHDOG" not in m]
    assert [next(iter(m)) for m in told] == ["READY", "RELOADING", "READY", "RELOADING", "READY", "STOPPING"]
    assert manager.status() == "draining, requests running: 0"
    assert float(told[-1]["EXTEND_TIMEOUT_USEC"]) > daemon.sections["drain"]["timeout_s"] * 1e6


async def test_a_reload_asked_for_during_the_start_is_done_after_it(daemon: Daemon, manager: Manager) -> None:
    starting = asyncio.create_task(daemon.start())
    # Loading the kernels comes next, and takes a while.
    await until(lambda: daemon.log.exists() and bool(daemon.lines("worker_up")), 300)
    daemon.configure(decode={"policy": "p2c"})
    daemon.signal(signal.SIGHUP)
    await starting
    try:
        (line,) = await daemon.logged("reloaded")
        assert line["policy"] == "p2c"
        events = [line["event"] for line in daemon.lines()]
        assert events.index("listening") < events.index("reloaded")
        assert [next(iter(m)) for m in manager.told() if "WATCHDOG" not in m][:2] == ["READY", "RELOADING"]
    finally:
        assert await daemon.stop() == 0
