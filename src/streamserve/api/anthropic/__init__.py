"""Anthropic's Messages API: requests are converted to chats, and take their path to the engine."""
