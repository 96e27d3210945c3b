"""Files of requests that are answered in the background, in OpenAI's format: /v1/files and /v1/batches."""
