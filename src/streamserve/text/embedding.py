"""Embeddings from the vectors that the engine pools."""

import numpy as np
from numpy.typing import NDArray

from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import Pooling, SamplingParams

Floats = NDArray[np.float32]


def check_dimensions(dimensions: int | None, config: EmbeddingConfig, size: int) -> None:
    """Raise RequestError unless embeddings of `size` numbers may be shortened to `dimensions` numbers."""
    if dimensions is None:
        return
    if not 1 <= dimensions <= size:
        raise RequestError(f"dimensions must be between 1 and {size}, got {dimensions}", field="dimensions")
    if config.dimensions and dimensions not in config.dimensions:
        allowed = ", ".join(map(str, config.dimensions))
        raise RequestError(f"dimensions must be one of {allowed}, got {dimensions}", field="dimensions")


def embedding(vector: bytes, config: EmbeddingConfig, dimensions: int | None = None) -> Floats:
    """Return the embedding of a pooled vector: its first `dimensions` numbers (None: all), divided by their
    L2 norm if the model normalizes. Raises RequestError if there are fewer numbers."""
    pooled = np.frombuffer(vector, "<f4")
    check_dimensions(dimensions, config, len(pooled))
    shortened = pooled[:dimensions].astype(np.float64)
    norm = float(np.sqrt(shortened @ shortened)) if config.normalize else 1.0
    return (shortened / max(norm, 1e-12)).astype(np.float32)


def similarity(first: Floats, second: Floats) -> float:
    """Return the cosine similarity of two embeddings; 0 if one of them is zero."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norms = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norms if norms else 0.0


def embedding_params(config: EmbeddingConfig) -> SamplingParams:
    """Return the parameters of a request for an embedding."""
    return SamplingParams(max_tokens=0, temperature=0.0, pooling=Pooling(config.pooling))
