"""The library: `LLM` for scripts, `AsyncLLM` for event loops, and prompt streams."""
