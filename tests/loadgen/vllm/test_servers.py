"""How real servers are started and ended: the configuration of each role, and processes that die. Without vLLM."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from loadgen.vllm.fleet import FleetError, ServerSettings, VllmFleet, VllmServer
from loadgen.vllm.model import ModelSpec

SETTINGS = ServerSettings(Path("model"), lease_seconds=7, kv_load_failure_policy="recompute")


def test_prefill_has_nixl_first_and_the_hook(tmp_path: Path) -> None:
    config = VllmServer("p0", "prefill", SETTINGS, tmp_path, endpoints=["tcp://127.0.0.1:1"]).transfer_config()
    assert config is not None
    nixl, hook = config["kv_connector_extra_config"]["connectors"]
    assert (nixl["kv_connector"], nixl["kv_role"], nixl["kv_buffer_device"]) == ("NixlConnector", "kv_producer", "cpu")
    assert nixl["kv_connector_extra_config"] == {"kv_lease_duration": 7}
    assert hook["kv_connector_extra_config"]["eldr_endpoints"] == ["tcp://127.0.0.1:1"]
    assert hook["kv_connector_extra_config"]["eldr_worker"] == "p0"


def test_other_roles(tmp_path: Path) -> None:
    decode = VllmServer("d0", "decode", SETTINGS, tmp_path).transfer_config()
    bare = VllmServer("p1", "prefill", SETTINGS, tmp_path).transfer_config()
    assert decode is not None
    assert bare is not None
    assert (decode["kv_connector"], decode["kv_role"]) == ("NixlConnector", "kv_consumer")
    assert decode["kv_load_failure_policy"] == "recompute"
    assert (bare["kv_connector"], bare["kv_role"]) == ("NixlConnector", "kv_producer")
    plain = VllmServer("x", "plain", SETTINGS, tmp_path)
    assert plain.transfer_config() is None
    assert "--kv-transfer-config" not in plain.command()


def test_decode_with_the_hook(tmp_path: Path) -> None:
    config = VllmServer("d0", "decode", SETTINGS, tmp_path, endpoints=["tcp://127.0.0.1:1"]).transfer_config()
    assert config is not None
    assert config["kv_load_failure_policy"] == "recompute"
    nixl, hook = config["kv_connector_extra_config"]["connectors"]
    assert (nixl["kv_connector"], nixl["kv_role"]) == ("NixlConnector", "kv_consumer")
    assert hook["kv_connector_extra_config"]["eldr_phase"] == "decode"


def test_prefill_servers_publish_their_events(tmp_path: Path) -> None:
    fleet = VllmFleet(SETTINGS, tmp_path, endpoints=["tcp://127.0.0.1:1"], prefill=2)
    assert len({s.kv_events for s in fleet.prefill}) == 2
    for server in fleet.servers:
        assert ("--kv-events-config" in server.command()) == (server.role == "prefill")


def test_servers_share_no_port(tmp_path: Path) -> None:
    fleet = VllmFleet(SETTINGS, tmp_path, endpoints=[], prefill=2, decode=3, plain=True)
    assert [s.name for s in fleet.servers] == ["p0", "p1", "d0", "d1", "d2", "plain"]
    ports = [p for s in fleet.servers for p in (s.port, s.side_port)]
    assert len(set(ports)) == len(ports)


class Fake(VllmServer):
    """A server whose command is a Python snippet."""

    code = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


def test_a_server_that_dies_is_told_with_its_log(tmp_path: Path) -> None:
    server = Fake("p0", "plain", SETTINGS, tmp_path)
    server.code = "raise SystemExit('no experts here')"
    server.start()
    with pytest.raises(FleetError, match=r"(?s)p0 ended.*no experts here"):
        server.wait(120)
    server.stop()


def test_stop_ends_the_children_too(tmp_path: Path) -> None:
    server = Fake("p0", "plain", SETTINGS, tmp_path)
    server.code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    server.start()
    while not server.log_path.read_text().strip():
        time.sleep(0.02)
    child = int(server.log_path.read_text())
    assert server.rss_bytes() > 0
    with pytest.raises(FleetError, match="not healthy within"):
        server.wait(0.3)
    server.stop(timeout=2)
    assert not server.running
    for _ in range(3000):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail(f"child {child} outlived its server")


def test_domain_tokens_are_of_their_domain_and_not_special() -> None:
    spec = ModelSpec()
    for domain in range(spec.domains):
        tokens = spec.domain_tokens(domain)
        assert min(tokens) >= 4
        assert {t % spec.domains for t in tokens} == {domain}
