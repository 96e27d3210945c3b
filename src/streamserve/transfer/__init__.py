"""Move KV blocks between workers: engine.transfer.Transport on real memory."""
