"""Expert signatures: geometry, wire frames from the hook, receiver and block cache. Knows nothing of HTTP."""
