"""Prometheus metrics of the API server, its workers and its models."""
