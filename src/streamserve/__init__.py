"""streamserve: serve Llama-family models with stream pairs, token-tree speculation and arriving prompts."""

__version__ = "0.1.0"
