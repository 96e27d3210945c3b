"""KV transfers by NIXL: one-sided writes into the memory of another worker."""
