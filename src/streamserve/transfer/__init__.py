"""Move KV blocks between workers: engine.transport.Transport on real memory."""
