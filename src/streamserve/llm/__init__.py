"""The library: `LLM` for scripts, `AsyncLLM` for event loops, and prompts that arrive in chunks."""
