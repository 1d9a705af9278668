"""The workers as eldrd knows them: state, load, leases, health, vLLM's dialect. Nothing here chooses a worker."""
