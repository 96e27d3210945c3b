"""Worker processes: `python -m streamserve.workers` with a WorkerConfig on standard input."""
