"""Anthropic's Messages API: its requests are converted to chat requests."""
