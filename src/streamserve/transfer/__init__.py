"""Moves KV blocks between workers: implements contracts.transport.Transport with real memory."""
