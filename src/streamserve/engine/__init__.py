"""The engine of one worker: sequences, KV blocks, the prefix index, the scheduler and the step loop."""
