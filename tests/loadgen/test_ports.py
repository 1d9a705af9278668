"""Ports that servers bind later stay free until then: no outgoing connection is given one of them."""

from __future__ import annotations

import socket
from pathlib import Path

from loadgen import ports
from loadgen.fleet import EmulatedFleet, FleetSpec


def ephemeral() -> int:
    """The first port that an outgoing connection may be given."""
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(file.read_text().split()[0]) if file.exists() else 32_768


def test_ports_are_free_of_connections_and_given_once() -> None:
    given = [ports.free_port() for _ in range(200)]
    assert len(set(given)) == 200
    assert max(given) < ephemeral()
    for port in given:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))


async def test_emulated_workers_can_have_theirs_again() -> None:
    async with EmulatedFleet(FleetSpec(prefill=1, decode=1)) as fleet:
        assert all(w.port < ephemeral() for w in fleet.workers)
