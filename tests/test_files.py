"""What settings name outside themselves: places that cannot be written are told of before anything is to be written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from eldrd import config, files
from eldrd.cli import main

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """
[prefill]
workers = [{ name = "p0", url = "http://127.0.0.1:1" }]
[decode]
workers = [{ name = "d0", url = "http://127.0.0.1:2" }]
[signatures]
listen = "tcp://127.0.0.1:3"
"""
REFIT = '[partitions]\nfile = "p"\n[refit]\nenabled = true\n'


def problem(folder: Path, text: str) -> str:
    """What is wrong with the settings, "" if nothing is."""
    path = folder / "eldrd.toml"
    path.write_text(TEXT + text)
    try:
        files.writable(path, config.load(path))
    except config.ConfigError as e:
        return str(e).replace(str(path), "C").replace(str(folder), "F")
    return ""


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that only root could write to, seen by another user, beside a file."""
    (tmp_path / "file").touch()
    folder = tmp_path / "closed"
    folder.mkdir()
    may = os.access

    def access(path: Path, mode: int) -> bool:
        return may(path, mode) and not (path == folder and mode & os.W_OK)

    monkeypatch.setattr(os, "access", access)
    return folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ('[capture]\ndir = "capture"', ""),
        ('[capture]\ndir = "new/er/capture"', ""),
        ('[capture]\ndir = "closed"', "C: capture.dir: F/closed: this user cannot write there"),
        ('[capture]\ndir = "closed/capture"', "C: capture.dir: F/closed/capture: this user cannot write there"),
        ('[capture]\ndir = "file/capture"', "C: capture.dir: F/file/capture: this user cannot write there"),
        (REFIT, ""),
        (REFIT + 'state = "closed/refit"', "C: refit.state: F/closed/refit: this user cannot write there"),
        (REFIT + 'state = "new/refit"', "C: refit.state: F/new/refit: this user cannot write there"),
        (REFIT.replace("true", "false") + 'state = "closed/refit"', ""),
        (REFIT.replace('"p"', '"closed/p"'), "C: refit.state: F/closed/p.refit: this user cannot write there"),
    ],
)
def test_places_to_write_to(closed: Path, text: str, expected: str) -> None:
    assert problem(closed.parent, text) == expected


def test_check_tells_of_them(tmp_path: Path) -> None:
    path = tmp_path / "eldrd.toml"
    path.write_text(TEXT + '[capture]\ndir = "eldrd.toml/capture"')
    done = CliRunner().invoke(main, ["check", "--config", str(path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"eldrd: {path}: capture.dir: ")
    path.write_text(TEXT + '[capture]\ndir = "capture"')
    assert CliRunner().invoke(main, ["check", "--config", str(path)]).exit_code == 0
