"""The systemd unit: systemd itself finds nothing wrong with it, and it says what the daemon needs."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "eldrd.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "eldrd.service"
    unit.write_text(UNIT.read_text().replace("/opt/eldrd/bin/eldrd", "/bin/true"))
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.strip()) == (0, "")


def test_stop_waits_longer_than_the_default_drain() -> None:
    from eldrd.config import Drain

    unit = configparser.RawConfigParser(strict=False, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert "-HUP" in service["ExecReload"]
    assert float(service["TimeoutStopSec"]) > Drain().timeout_s + Drain().delay_s
    assert service["User"] != "root"
    assert service["Environment"].startswith("NUMBA_CACHE_DIR=/var/cache/eldrd")
