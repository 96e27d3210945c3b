"""Move KV blocks between workers: contracts.transport.Transport on real memory."""
