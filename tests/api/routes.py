"""Routes grouped by the part of the server that handles them."""

OF_VECTORS = (
    *("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"),
    *("/api/embed", "/api/embeddings"),
)
