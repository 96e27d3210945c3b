"""/v1/streams: prompts that arrive in chunks, over HTTP and WebSockets."""
