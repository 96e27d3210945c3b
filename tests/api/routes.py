"""Routes by what serves them."""

OF_VECTORS = (
    *("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"),
    *("/api/embed", "/api/embeddings"),
)
