"""What can be wrong with what a benchmark was asked to do."""


class BenchError(ValueError):
    """A workload, trace, target or server that cannot be used; the message says what to change."""
