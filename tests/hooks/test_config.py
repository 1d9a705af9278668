"""`python -m eldrd_hook`: the JSON that vLLM gets, and what a bad call is told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from eldrd_hook import plugin
from eldrd_hook.__main__ import main, transfer_config

HOOK = {
    "kv_connector": "EldrConnector",
    "kv_connector_module_path": "eldrd_hook.connector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"eldr_endpoints": ["tcp://127.0.0.1:5601"], "eldr_phase": "prefill"},
}


def test_nixl_comes_first_and_the_hook_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = '{"kv_buffer_device": "cpu"}'
    assert main(["--transfer", "nixl", "--endpoint", "tcp://127.0.0.1:5601", "--options", options]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}, HOOK]
        },
    }


def test_hook_alone_and_its_names() -> None:
    config = transfer_config("none", ["ipc:///run/a", "ipc:///run/b"], worker="p7", phase="decode")
    assert config["kv_connector_extra_config"] == {
        "eldr_endpoints": ["ipc:///run/a", "ipc:///run/b"],
        "eldr_phase": "decode",
        "eldr_worker": "p7",
    }


def test_the_load_failure_policy_goes_to_the_outer_configuration() -> None:
    """vLLM's scheduler reads it there, and MultiConnector hands the children theirs."""
    options = {"kv_load_failure_policy": "recompute", "kv_buffer_device": "cpu"}
    config = transfer_config("nixl", ["tcp://a:1"], role="kv_consumer", phase="decode", options=options)
    assert config["kv_load_failure_policy"] == "recompute"
    nixl, hook = config["kv_connector_extra_config"]["connectors"]
    assert nixl == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cpu"}
    assert hook["kv_connector_extra_config"]["eldr_phase"] == "decode"
    assert "kv_load_failure_policy" in options, "the caller's own is left as it is"


def test_any_connector_by_its_class_name() -> None:
    [first, _] = transfer_config("MyConnector", ["tcp://a:1"], role="kv_producer")["kv_connector_extra_config"][
        "connectors"
    ]
    assert first == {"kv_connector": "MyConnector", "kv_role": "kv_producer"}


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "--endpoint"),
        (["--endpoint", "a", "--options", "{"], "not JSON"),
        (["--endpoint", "a", "--options", "[]"], "not a JSON object"),
        (["--endpoint", "a", "--role", "both"], "kv_both"),
    ],
)
def test_bad_calls_end_with_2_and_say_why(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert why in capsys.readouterr().err


def test_prints_without_vllm_or_torch() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; "
        "from eldrd_hook import attribution, fingerprint, plugin, push, wire; "
        "from eldrd_hook.__main__ import main; main(['--endpoint', 'tcp://127.0.0.1:1'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_path())
    assert json.loads(run.stdout)["kv_connector"] == "MultiConnector"


def _path() -> dict[str, str]:
    import os
    from pathlib import Path

    import eldrd_hook

    return {**os.environ, "PYTHONPATH": str(Path(eldrd_hook.__file__).parents[1])}


class Transfer:
    def __init__(self, name: str | None, children: list[dict[str, str]] | None = None) -> None:
        self.kv_connector = name
        self.kv_connector_extra_config = {} if children is None else {"connectors": children}


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (None, False),
        (Transfer("NixlConnector"), False),
        (Transfer("EldrConnector"), True),
        (Transfer("MultiConnector", [{"kv_connector": "NixlConnector"}, {"kv_connector": "EldrConnector"}]), True),
        (Transfer("MultiConnector", [{"kv_connector": "NixlConnector"}]), False),
    ],
)
def test_plugin_binds_early_only_for_servers_with_the_hook(transfer: Transfer | None, expected: bool) -> None:
    assert plugin.configured(transfer) is expected
