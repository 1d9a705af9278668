"""vLLM's entry point (group vllm.general_plugins): makes EldrConnector known. Must stay cheap: every process runs it.

Where torch.compile traces the MoE layer (CPU), a callback set after the first compilation is never called. There the
plugin binds each layer as it is built, if the server is configured with EldrConnector.
"""

from __future__ import annotations

from typing import Any

NAME = "EldrConnector"
_registered = False


def register() -> None:
    """Registers the connector and, on CPU, the early binding. Harmless when called again."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "eldrd_hook.connector", NAME)
    if current_platform.is_cpu():
        _bind_early()


def configured(transfer: Any) -> bool:
    """Whether a server's KVTransferConfig names EldrConnector, alone or below MultiConnector."""
    if transfer is None:
        return False
    children = (transfer.kv_connector_extra_config or {}).get("connectors", [])
    return NAME in (transfer.kv_connector, *(c.get("kv_connector") for c in children))


def _bind_early() -> None:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    build = MoERunner.__init__

    def build_and_bind(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        config = get_current_vllm_config()
        if not configured(config.kv_transfer_config):
            return
        from eldrd_hook import capture

        if capture.traced(config):
            capture.of_process(config).bind(self, early=True)

    MoERunner.__init__ = build_and_bind
