"""Configuration: the example is the defaults, the environment wins, and errors name file, key, value and what is allowed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from eldrd import config
from eldrd.routing.build import POLICIES

EXAMPLE = Path(__file__).parents[1] / "eldrd.toml.example"
BASE = """
[prefill]
workers = [{ name = "p0", url = "http://[::1]:8101" }]
[decode]
workers = [{ name = "d0", url = "http://127.0.0.1:8111" }]
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in list(__import__("os").environ):
        if name.startswith("ELDRD_"):
            monkeypatch.delenv(name)

    def write(text: str) -> Path:
        path = tmp_path / "eldrd.toml"
        path.write_text(text)
        return path

    return write


def problems(path: Path) -> str:
    with pytest.raises(config.ConfigError) as e:
        config.load(path)
    return str(e.value)


def test_the_example_names_every_key_with_its_default() -> None:
    values = tomllib.loads(EXAMPLE.read_text())
    assert config.load(EXAMPLE).decode.policy == "jsq"
    for section, field in config.Settings.model_fields.items():
        if section == "models":
            assert "[[models]]" in EXAMPLE.read_text()
            continue
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        assert set(values[section]) == set(kind.model_fields), section
        for key, k in kind.model_fields.items():
            if k.default is not PydanticUndefined:
                default = list(k.default) if isinstance(k.default, tuple) else k.default
                assert values[section][key] == default, f"{section}.{key}"
            assert k.description, f"{section}.{key} has no description"


def test_a_small_file_is_enough(write: Any) -> None:
    settings = config.load(write(BASE))
    assert settings.prefill.workers[0].url == "http://[::1]:8101"
    assert config.Address(settings.server.listen).port == 8100


def test_policies_of_config_and_routing_are_the_same() -> None:
    assert config.DecodePolicy.__args__ == POLICIES


def test_environment_wins(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELDRD_DECODE_TAU", "0.25")
    monkeypatch.setenv("ELDRD_SERVER_MAX_BODY_BYTES", "2048")
    monkeypatch.setenv("ELDRD_PREFILL_WORKERS", '[{"name":"px","url":"http://10.0.0.1:1"}]')
    settings = config.load(write(BASE))
    assert settings.decode.tau == 0.25
    assert settings.server.max_body_bytes == 2048
    assert settings.prefill.workers[0].name == "px"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[decode\n", ["not TOML", "line 1"]),
        ("[decode]\nworkers=[]\n", ["decode.workers", "at least 1"]),
        (BASE + "tau = 5\n", ["decode.tau = 5", "less than or equal to 2"]),
        (BASE + 'policy = "near"\n', ["decode.policy = 'near'", "'jsq'", "'eldr'"]),
        (
            BASE + "polcy = 1\n",
            ["decode.polcy: unknown key", "did you mean 'policy'", "allowed: policy, second_nearest, tau, workers"],
        ),
        (BASE + "[sever]\na = 1\n", ["sever: unknown key", "did you mean 'server'"]),
        (BASE + '[server]\nlisten = "8100"\n', ["server.listen = '8100'", "host:port"]),
        (BASE + '[server]\nlisten = "::1:8100"\n', ["server.listen", "[address]:port"]),
        (BASE + '[signatures]\nlisten = "udp://x"\n', ["signatures.listen", "tcp://"]),
        (BASE + "[timeouts]\nidle_s = 0\n", ["timeouts.idle_s = 0", "greater than 0"]),
        (BASE + 'policy = "eldr"\n', ["'eldr' needs partitions.file"]),
        (BASE.replace("8111", "8111/v1"), ["decode.workers[0].url", "must not have a path"]),
        (BASE.replace("http://127", "127"), ["decode.workers[0].url", "must be http://"]),
        (BASE.replace('"d0"', '"p0"'), ["share the name 'p0'"]),
        (BASE.replace('"d0"', '"d 0"'), ["decode.workers[0].name = 'd 0'", "match"]),
    ],
)
def test_errors_say_where_what_and_what_is_allowed(write: Any, text: str, parts: list[str]) -> None:
    path = write(text)
    message = problems(path)
    assert str(path) in message
    for part in parts:
        assert part in message


def test_a_wrong_variable_is_named(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELDRD_DECODE_TAU", "9")
    assert "ELDRD_DECODE_TAU" in problems(write(BASE))
    monkeypatch.delenv("ELDRD_DECODE_TAU")
    monkeypatch.setenv("ELDRD_DECODE_TUA", "0.1")
    assert "did you mean ELDRD_DECODE_TAU" in problems(write(BASE))


def test_a_missing_file(tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "none.toml")


def test_files_are_relative_to_the_configuration(write: Any) -> None:
    path = write(BASE + '[partitions]\nfile = "p.safetensors"\n')
    assert config.load(path).partitions.file == str(path.parent / "p.safetensors")
