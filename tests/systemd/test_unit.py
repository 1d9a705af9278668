"""The systemd unit: systemd itself finds nothing wrong with it, it says what the daemon needs, and the README installs it."""

from __future__ import annotations

import configparser
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from eldrd import daemon
from eldrd.config import Drain

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "eldrd.service"


@pytest.fixture
def service() -> configparser.SectionProxy:
    """The unit's section; of a key that stands there several times, the last."""
    unit = configparser.RawConfigParser(strict=False, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    return unit["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "eldrd.service"
    unit.write_text(UNIT.read_text().replace("/opt/eldrd/bin/eldrd", "/bin/true"))
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.strip()) == (0, "")


def test_stop_waits_longer_than_the_default_drain(service: configparser.SectionProxy) -> None:
    assert service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) > Drain().timeout_s + Drain().delay_s
    assert service["User"] != "root"
    assert service["Environment"].startswith("NUMBA_CACHE_DIR=/var/cache/eldrd")


def test_a_reload_fails_with_the_check() -> None:
    steps = [line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith("ExecReload=")]
    assert [step.split()[:2] for step in steps] == [["/opt/eldrd/bin/eldrd", "check"], ["/bin/kill", "-HUP"]]


def test_a_wrong_configuration_is_not_started_again_and_again(
    service: configparser.SectionProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "eldrd.toml"
    wrong.write_text("[decode]\npolicy = 'elder'\n")
    assert str(daemon.serve(wrong)) == service["RestartPreventExitStatus"]
    assert "decode.policy = 'elder'" in capsys.readouterr().err
    # systemd restarts whatever the status of a command before ExecStart is.
    assert "ExecStartPre" not in service


def test_the_group_may_connect_to_a_hooks_socket_and_nobody_else(service: configparser.SectionProxy) -> None:
    assert 0o777 & ~int(service["UMask"], 8) == 0o770
    assert int(service["RuntimeDirectoryMode"], 8) == 0o750


def test_tmpfiles_and_the_unit_agree_on_modes(service: configparser.SectionProxy) -> None:
    lines = (ROOT / "systemd" / "eldrd.tmpfiles.conf").read_text().splitlines()
    modes = {path: mode for _, path, mode, *_ in (line.split() for line in lines)}
    assert modes == {
        "/etc/eldrd": service["ConfigurationDirectoryMode"],
        "/var/lib/eldrd": service["StateDirectoryMode"],
        "/var/cache/eldrd": service["CacheDirectoryMode"],
    }


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_the_readme_makes_user_and_folders(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    commands = [line.strip() for line in (ROOT / "README.md").read_text().splitlines() if "    systemd-" in line]
    assert len(commands) == 2
    for command in commands:
        tool, _, arguments = command.partition(" ")
        script = f"{tool} --root={tmp_path} {arguments}"
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
    users = [line.split(":") for line in (tmp_path / "etc" / "passwd").read_text().splitlines()]
    ((uid, gid),) = ((int(user[2]), int(user[3])) for user in users if user[0] == "eldrd")
    found = {name: (tmp_path / name).stat() for name in ("etc/eldrd", "var/lib/eldrd", "var/cache/eldrd")}
    assert {name: (s.st_uid, s.st_gid, stat.S_IMODE(s.st_mode)) for name, s in found.items()} == {
        "etc/eldrd": (0, gid, 0o750),
        "var/lib/eldrd": (uid, gid, 0o750),
        "var/cache/eldrd": (uid, gid, 0o750),
    }
