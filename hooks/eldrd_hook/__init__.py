"""The eldrd hook for vLLM: counts, per KV block, the experts a server's tokens are routed to. Imports neither vLLM nor eldrd here."""

__version__ = "0.1.0"
