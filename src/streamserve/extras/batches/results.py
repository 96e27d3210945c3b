"""The results of a batch while they are written: answers to one file, failures to another, in the order of
requests."""

import msgspec

from streamserve.extras.batches.folder import BatchFolder
from streamserve.extras.batches.lines import ResultLine, append_line, complete_lines
from streamserve.extras.batches.schemas import RequestCounts, StoredBatch


class Results:
    """The two result files of a batch, opened for appending. A context manager that closes them.

    Every input line has one line in one of the files, in the same order: the number of lines is the position
    at which to continue. Opening reads the files, so do it outside of the event loop. `cut` is the number of
    bytes of an incomplete last line that were cut off.
    """

    def __init__(self, folder: BatchFolder, stored: StoredBatch) -> None:
        self._folder = folder
        self._total = stored.batch.request_counts.total
        paths = [folder.content(name) for name in (stored.output, stored.error)]
        before = sum(path.stat().st_size for path in paths if path.exists())
        self._counts = [complete_lines(path) for path in paths]
        self._files = [path.open("ab", buffering=0) for path in paths]
        self.cut = before - sum(file.tell() for file in self._files)

    @property
    def number(self) -> int:
        """The number of requests that have a result."""
        return sum(self._counts)

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(total=self._total, completed=self._counts[0], failed=self._counts[1])

    def write(self, result: ResultLine) -> None:
        """Append a result. Raises RequestError (413) if the folder is full, OSError if the disk is full."""
        line = msgspec.json.encode(result) + b"\n"
        self._folder.reserve(len(line))
        index = 0 if result.succeeded else 1
        try:
            append_line(self._files[index], line)
        except OSError:
            self._folder.release(len(line))
            raise
        self._counts[index] += 1

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files:
            file.close()
