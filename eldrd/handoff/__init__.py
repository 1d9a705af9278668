"""One request's way from prefill to decode: lifecycle, ledger, retry. Nothing here parses client HTTP."""
