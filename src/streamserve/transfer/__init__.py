"""Moving KV blocks from worker to worker: engine.transfer.Transport on real memory."""
