"""One worker's state and its step: sequences, KV blocks, the prefix index and the scheduler."""
