"""The door: OpenAI's routes over HTTP. Knows of the engine only what `generator.Generator` says."""
