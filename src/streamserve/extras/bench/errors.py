"""Errors in the configuration of a benchmark."""


class BenchError(ValueError):
    """A workload, trace, target or server that cannot be used; the message says what to change."""
