"""vLLM plugin: lets NIXL's progress thread sleep between polls. Nothing else; put this folder on PYTHONPATH to use it.

nixl's Python API fixes the delay at 0, a spin that costs an idle server most of a core.
NIXL_PROGRESS_DELAY_US: microseconds between polls (default 1000; 0 leaves NIXL as it is).
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """vLLM's entry point; runs in every process before NIXL is set up."""
    delay_us = int(os.environ.get("NIXL_PROGRESS_DELAY_US", "1000"))
    if delay_us <= 0:
        return
    # vLLM sets this only where nixl has not been imported yet.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    try:
        import nixl._api as api
    except ImportError:
        return
    bind = api.nixlBind
    if getattr(bind, "_progress_delay_set", False):
        return
    original = bind.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return original(name, config)

    bind.nixlAgent = agent
    bind._progress_delay_set = True
