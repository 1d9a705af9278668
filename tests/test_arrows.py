"""The rooms' import arrows, that every module says what it is for, and that none grows past 400 lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES = {"config", "telemetry"}
MAY_IMPORT = {
    "config": set(),
    "telemetry": set(),
    "signatures": LEAVES,
    "partitions": LEAVES | {"signatures"},
    "routing": LEAVES | {"signatures", "partitions"},
    "fleet": LEAVES,
    "handoff": LEAVES | {"fleet", "signatures", "partitions", "routing"},
    "api": LEAVES | {"fleet", "signatures", "partitions", "routing", "handoff"},
}
WITHOUT_HTTP = ("signatures", "partitions", "routing")
HTTP = {"aiohttp", "http", "urllib", "requests", "httpx", "httptools"}
SOURCES = [*ROOT.glob("eldrd/**/*.py"), *ROOT.glob("hooks/eldrd_hook/*.py"), *ROOT.glob("loadgen/**/*.py")]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows(room: str) -> None:
    paths = [ROOT / "eldrd" / f"{room}.py"] if room == "config" else list((ROOT / "eldrd" / room).glob("*.py"))
    assert paths
    for path in paths:
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "eldrd" and len(parts) > 1 and parts[1] != "__version__":
                assert parts[1] in MAY_IMPORT[room] | {room}, f"{path.relative_to(ROOT)} imports {name}"
            assert parts[0] not in ("loadgen", "eldrd_hook"), f"{path.relative_to(ROOT)} imports {name}"
            if room in WITHOUT_HTTP:
                assert parts[0] not in HTTP, f"{path.relative_to(ROOT)} imports {name}"


def test_the_hook_imports_nothing_of_eldrd() -> None:
    for path in (ROOT / "hooks" / "eldrd_hook").glob("*.py"):
        assert not {n for n in imports(path) if n.split(".")[0] in ("eldrd", "loadgen")}, path


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_say_what_they_are_for(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{path}: no docstring"
    assert "." in text, f"{path}: no sentence"
    assert len(path.read_text().splitlines()) <= 400, f"{path}: over 400 lines"
