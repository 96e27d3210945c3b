"""The client, as it is called where the server is installed: the package `streamserve_client`.

Its distribution has dependencies that a server does not need, so a server is installed without it.
"""

try:
    from streamserve_client import AsyncPromptStream, ChunkRef, PromptStream, StreamError, Withdrawn
except ImportError:
    raise ImportError(
        "streamserve.client needs streamserve-client: pip install its wheel, or ./client of the repository"
    ) from None

__all__ = ["AsyncPromptStream", "ChunkRef", "PromptStream", "StreamError", "Withdrawn"]
