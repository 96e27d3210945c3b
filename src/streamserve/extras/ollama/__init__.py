"""Ollama's API: its requests are converted to chat requests, and its replies are lines of JSON."""
