"""The results of a batch as they are written: answers to one file, failures to another, in order."""

from types import TracebackType

import msgspec

from streamserve.api.batches.folder import BatchFolder
from streamserve.api.batches.lines import ResultLine, append_line, complete_lines
from streamserve.api.batches.schemas import RequestCounts, StoredBatch


class Results:
    """The two files of a batch, opened to go on where they end. A context manager that closes them.

    Every line of the input has one line in one of them, in the same order: their number says where to go on.
    Opening reads the files, outside of the event loop; `cut` is how many bytes of an incomplete line were
    then cut off.
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
        """How many requests have a result."""
        return sum(self._counts)

    @property
    def counts(self) -> RequestCounts:
        """The counts so far."""
        return RequestCounts(total=self._total, completed=self._counts[0], failed=self._counts[1])

    def write(self, result: ResultLine) -> None:
        """Append a result. Raises RequestError (413) if the folder is full, OSError if the disk is."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
