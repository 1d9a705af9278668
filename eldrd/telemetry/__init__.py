"""Metrics, logs, tracing: leaves that anyone may import. No prompt, completion or key passes through here."""
