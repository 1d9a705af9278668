"""The command line: fit with its reports, inspect and check; what is printed, written and refused."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner

from eldrd import config, daemon
from eldrd.cli import main
from eldrd.partitions import file as partition_file
from eldrd.signatures.capture import CaptureWriter
from eldrd.signatures.geometry import Geometry

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

GEOMETRY = Geometry("m", 5, (0, 1), 8, 2, 16)


def write_capture(directory: Path, *, decode: bool, n: int = 40) -> Path:
    rng = np.random.default_rng(0)
    writer = CaptureWriter(directory, GEOMETRY, 1 << 20)
    for i in range(n):
        taste = np.where(np.arange(8) // 4 == i % 2, 8.0, 0.5)
        counts = rng.poisson(taste, (2, 8)).astype(np.int32)
        writer.add(counts, 16, 16, "ab"[i % 2], rng.poisson(taste, (2, 8)).astype(np.int32) if decode else None)
    writer.flush()
    return directory


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_fit_writes_partition_and_reports(tmp_path: Path) -> None:
    capture, out, folder = write_capture(tmp_path / "c", decode=True), tmp_path / "p", tmp_path / "report"
    done = run("fit", "--capture", capture, "--workers", "d0, d1", "--out", out, "--ep-ranks", "2", "--report", folder)
    assert done.exit_code == 0, done.output
    assert "label purity" in done.output
    partition = partition_file.load(out)
    assert partition.workers == ("d0", "d1")
    assert partition.placement is not None
    assert partition.placement.ranks == 2
    report = json.loads((folder / "report.json").read_text())
    assert report["purity"] == 1
    assert len(report["transforms"]) == 6
    assert len(report["rho_by_layers"]["rho"]) == 2
    assert report["active"]["same"] < report["active"]["mixed"]
    assert report["placement"]["ranks"] == 2
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    shown = run("inspect", out)
    assert "expert-parallel ranks  2" in shown.output


def test_fit_without_decode_counts_says_so(tmp_path: Path) -> None:
    capture, out = write_capture(tmp_path / "c", decode=False), tmp_path / "p"
    for layers in ("auto", "greedy"):
        done = run("fit", "--capture", capture, "--workers", "d0,d1", "--out", out, "--layers", layers, "--json")
        assert done.exit_code == 0
        assert "no decode counts in the capture: all layers are used" in done.stderr
        assert json.loads(done.stdout)["layers"] == 2
    done = run("fit", "--capture", capture, "--workers", "d0,d1", "--out", out, "--layers", "all")
    assert done.stderr == ""


def test_a_refit_may_write_over_its_previous(tmp_path: Path) -> None:
    capture, out = write_capture(tmp_path / "c", decode=False), tmp_path / "p"
    arguments = ("fit", "--capture", capture, "--out", out, "--json")
    assert run(*arguments, "--workers", "d0,d1").exit_code == 0
    again = run(*arguments, "--workers", "d1,d0", "--previous", out, "--seed", "9")
    assert json.loads(again.stdout)["moved"] == 0
    assert partition_file.load(out).workers == ("d1", "d0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "d0,d0"), "workers must be unique"),
        (("--workers", "d0", "--ep-ranks", "3"), "8 experts do not split evenly over 3 ranks"),
        (("--workers", "d0", "--previous", "/nonexistent"), "/nonexistent: not a readable partition file"),
    ],
)
def test_fit_refuses(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    capture = write_capture(tmp_path / "c", decode=False)
    done = run("fit", "--capture", capture, "--out", tmp_path / "p", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "p").exists()


def test_check_knows_refits(tmp_path: Path) -> None:
    """Workers that the partition lacks are an error, unless online refit adapts to them."""
    capture, out = write_capture(tmp_path / "c", decode=False), tmp_path / "p"
    assert run("fit", "--capture", capture, "--workers", "d0,d1", "--out", out).exit_code == 0
    text = """
[prefill]
workers = [{ name = "p0", url = "http://127.0.0.1:1" }]
[decode]
policy = "eldr"
workers = [{ name = "d0", url = "http://127.0.0.1:2" }, { name = "d2", url = "http://127.0.0.1:3" }]
[signatures]
listen = "tcp://127.0.0.1:4"
[partitions]
file = "p"
[refit]
enabled = """
    path = tmp_path / "eldrd.toml"
    path.write_text(text + "false")
    done = run("check", "--config", path)
    assert done.exit_code == 2
    assert f"{path}: partitions.file: {out}: the partition has workers the fleet lacks: d1" in done.stderr
    assert "the fleet has workers the partition lacks: d2" in done.stderr
    path.write_text(text + "true")
    assert run("check", "--config", path).exit_code == 0
    partition = partition_file.load(out)
    partition_file.save(replace(partition, workers=("x", "y")), out)
    assert run("check", "--config", path).exit_code == 2
    assert config.load(path).refit.enabled


def test_serve_may_open_as_many_files_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred streams more than a shell's limit must not look like workers that refuse connections."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[int] = []

    def serves(_: Path) -> int:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return 0

    monkeypatch.setattr(daemon, "serve", serves)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1] - 1), limits[1]))
    try:
        assert run("serve").exit_code == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert seen == [limits[1]]


def test_serve_goes_on_where_it_may_not_raise_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's sandbox refuses it."""

    def refused(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(daemon, "serve", lambda _: 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 65536))
    monkeypatch.setattr(resource, "setrlimit", refused)
    assert run("serve").exit_code == 0
