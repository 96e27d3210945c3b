"""Moves KV blocks between workers: implements engine.transport.Transport with real memory."""
