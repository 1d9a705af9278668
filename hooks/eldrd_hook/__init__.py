"""The eldrd hook for vLLM: counts the experts of each KV block's tokens. This file imports nothing."""

__version__ = "0.1.0"
