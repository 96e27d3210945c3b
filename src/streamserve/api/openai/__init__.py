"""OpenAI's routes, and vLLM's extensions of them."""
