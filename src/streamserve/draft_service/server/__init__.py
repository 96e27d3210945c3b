"""The draft service's side: sessions, fair batches, limits."""
