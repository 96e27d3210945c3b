"""OpenAI's Responses API: its requests are converted to chat requests; responses can be kept."""
