"""Settings of a checkpoint for embeddings."""

from typing import Literal

import msgspec


class EmbeddingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an embedding is made from hidden states. `max_tokens`: the length of the longest text; None: the
    context length. `dimensions`: the sizes that an embedding may be shortened to; empty: any."""

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    max_tokens: int | None = None
    dimensions: tuple[int, ...] = ()
