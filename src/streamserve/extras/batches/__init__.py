"""Batches: requests in a file, in OpenAI's format, are answered in the background: /v1/files and
/v1/batches."""
