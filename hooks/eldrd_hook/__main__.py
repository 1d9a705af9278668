"""``python -m eldrd_hook``: prints the JSON for vLLM's --kv-transfer-config. Imports nothing of vLLM."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

TRANSFERS = {
    "nixl": "NixlConnector",
    "mooncake": "MooncakeConnector",
    "moriio": "MoRIIOConnector",
    "lmcache": "LMCacheConnectorV1",
    "offloading": "OffloadingConnector",
    "none": None,
}


# vLLM's scheduler reads it from the outermost configuration.
_OUTER = "kv_load_failure_policy"


def transfer_config(
    transfer: str,
    endpoints: list[str],
    *,
    role: str = "kv_both",
    worker: str | None = None,
    phase: str = "prefill",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """vLLM's KV transfer configuration with the hook beside a connector that moves the KV.

    transfer: a key of TRANSFERS or the name of a vLLM connector; none: the hook alone; options: more keys for that
    connector, such as kv_buffer_device or kv_connector_extra_config; kv_load_failure_policy goes where vLLM looks for it.
    """
    extra: dict[str, Any] = {"eldr_endpoints": endpoints, "eldr_phase": phase}
    if worker:
        extra["eldr_worker"] = worker
    hook = {
        "kv_connector": "EldrConnector",
        "kv_connector_module_path": "eldrd_hook.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    mover = TRANSFERS.get(transfer, transfer)
    if mover is None:
        return hook
    options = dict(options or {})
    outer = {_OUTER: options.pop(_OUTER)} if _OUTER in options else {}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        **outer,
        "kv_connector_extra_config": {
            # The connector that moves the KV comes first: MultiConnector loads from the first that has tokens.
            "connectors": [{"kv_connector": mover, "kv_role": role, **options}, hook]
        },
    }


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"not JSON: {e}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eldrd_hook", description="Print the JSON for vLLM's --kv-transfer-config."
    )
    parser.add_argument(
        "--transfer", default="nixl", help=f"what moves the KV: {', '.join(TRANSFERS)}, or a vLLM connector's name"
    )
    parser.add_argument(
        "--endpoint", action="append", required=True, help="address of eldrd's signature socket; may be repeated"
    )
    parser.add_argument("--worker", help="this server's name in eldrd's metrics (default: host and process id)")
    parser.add_argument("--role", default="kv_both", choices=["kv_producer", "kv_consumer", "kv_both"])
    parser.add_argument(
        "--phase",
        default="prefill",
        choices=["prefill", "decode", "both"],
        help="what is counted: blocks of prompts (prefill servers), generated tokens (decode servers), both",
    )
    parser.add_argument(
        "--options", type=_object, help='more keys of the transfer connector, as JSON: \'{"kv_buffer_device": "cpu"}\''
    )
    a = parser.parse_args(argv)
    config = transfer_config(a.transfer, a.endpoint, role=a.role, worker=a.worker, phase=a.phase, options=a.options)
    sys.stdout.write(json.dumps(config) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
