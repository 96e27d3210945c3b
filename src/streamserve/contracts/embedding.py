"""How a checkpoint makes embeddings of hidden states."""

from typing import Literal

import msgspec


class EmbeddingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling and what follows it. `max_tokens`: the longest text; None: what the context holds.
    `dimensions`: those that an embedding may be shortened to; empty: any."""

    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    max_tokens: int | None = None
    dimensions: tuple[int, ...] = ()
