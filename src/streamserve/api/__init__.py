"""The API server: OpenAI's routes over HTTP. Uses the engine only through `generator.Generator`."""
