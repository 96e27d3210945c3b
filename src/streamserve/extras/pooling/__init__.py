"""Routes that generate no text: embeddings, scores and rankings of texts."""
