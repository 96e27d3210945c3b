"""Lines of batch files: each input line is a request, each output line its result."""

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from streamserve.protocol.errors import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""The routes that a batch's requests may use."""

BATCH_PRIORITY = 1_000_000
"""The minimum priority value of a batch's requests. Interactive requests have lower values unless they set
one, and lower values are served first."""

MAX_CUSTOM_ID = 512
PIECE = 32 << 10
"""Bytes of a file that are read at a time."""
_TEXT = re.compile(rb"\S")
_MAX_PRIORITY = 2**63 - 1


class LineError(ValueError):
    """A line that is not a valid request. `line` counts from 1; `param` is the field at fault."""

    def __init__(self, message: str, line: int, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.param = param


class RequestLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class LineResponse(msgspec.Struct, frozen=True):
    """The response to one request."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineFailure(msgspec.Struct, frozen=True):
    """Why a request got no response."""

    code: str
    message: str


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineFailure | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the request was answered."""
        return self.response is not None and self.response.status_code == 200


def result_of(custom_id: str, response: LineResponse | None, error: LineFailure | None = None) -> ResultLine:
    """Return the result of a request, with a new id."""
    return ResultLine(
        id=f"batch_req_{secrets.token_hex(16)}", custom_id=custom_id, response=response, error=error
    )


def parse_line(text: bytes, number: int, endpoints: Iterable[str]) -> RequestLine:
    """Return the request of a line. Raises LineError with its `number` if the line is not a request to one of
    these `endpoints`."""
    try:
        line = msgspec.json.decode(text, type=RequestLine)
    except (msgspec.ValidationError, RecursionError) as error:
        raise LineError(f"this line is not a request: {error}", number) from error
    except ValueError as error:
        raise LineError(f"this line is not valid JSON: {error}", number) from error
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        raise LineError(f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", number, "custom_id")
    if line.method != "POST":
        raise LineError(f"method must be POST, not {line.method[:40]!r}", number, "method")
    if line.url not in endpoints:
        raise LineError(f"url must be {' or '.join(endpoints)}, not {line.url[:100]!r}", number, "url")
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise LineError("body must be an object", number, "body")
    return line


def prepared_body(line: RequestLine) -> bytes:
    """Return the body of a request as the route gets it: its priority is below interactive requests, and its
    response is not stored.

    Raises RequestError if it asks for a stream.
    """
    fields = msgspec.json.decode(line.body, type=dict[str, msgspec.Raw])
    if bytes(fields.get("stream", b"")) not in (b"", b"false", b"null"):
        raise RequestError("stream is not supported in a batch: leave it out", field="stream")
    priority = bytes(fields.get("priority", b""))
    if priority.lstrip(b"-").isdigit():
        value = min(max(BATCH_PRIORITY, int(priority[:20])), _MAX_PRIORITY)
        fields["priority"] = msgspec.Raw(str(value).encode())
    elif priority in (b"", b"null"):
        fields["priority"] = msgspec.Raw(str(BATCH_PRIORITY).encode())
    if line.url == "/v1/responses":
        fields.setdefault("store", msgspec.Raw(b"false"))
    return msgspec.json.encode(fields)


class LinePosition(NamedTuple):
    """The position of a line in its file: its number from 1, its offset and its length in bytes."""

    number: int
    offset: int
    length: int

    def read(self, file: BinaryIO) -> bytes:
        return os.pread(file.fileno(), self.length, self.offset)


class LineScan:
    """Finds the nonblank lines of a file, a piece of the file at a time.

    A piece takes less than a millisecond, however many blank lines it has: the search for text runs in C.
    """

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self.ended = False
        self._file = file
        self._max_bytes = max_bytes
        self._error: LineError | None = None
        self._number, self._start = 1, 0  # of the line in which the next piece begins
        self._offset = 0  # of the next piece
        self._blank = True  # whether the line in which the next piece begins is blank so far

    def next(self) -> list[LinePosition]:
        """Return the positions of the lines that end in the next piece.

        Raises LineError for a line longer than `max_bytes`, after the positions before it were returned.
        """
        if self._error:
            self.ended = True
            raise self._error
        piece = os.pread(self._file.fileno(), PIECE, self._offset)
        found = list(self._ending_in(piece))
        if not piece:
            self.ended = not self._error
            if not self._blank:
                found.append(LinePosition(self._number, self._start, self._offset - self._start))
        self._offset += len(piece)
        return found

    def _ending_in(self, piece: bytes) -> Iterator[LinePosition]:
        position = 0
        while position < len(piece):
            if self._blank:
                position = self._skip_blanks(piece, position)
            end = piece.find(b"\n", position)
            line_end = self._offset + (len(piece) if end < 0 else end + 1)
            if not self._blank and line_end - self._start > self._max_bytes:
                limit = f"{self._max_bytes} bytes (max_body_bytes)"
                self._error = LineError(f"this line is longer than {limit}", self._number)
                return
            if end < 0:
                return
            yield LinePosition(self._number, self._start, line_end - self._start)
            self._number, self._start, self._blank = self._number + 1, line_end, True
            position = end + 1

    def _skip_blanks(self, piece: bytes, position: int) -> int:
        """Return the position of the next text, or the end of the piece if there is none."""
        text = _TEXT.search(piece, position)
        end = text.start() if text else len(piece)
        self._blank = text is None
        breaks = piece.count(b"\n", position, end)
        if breaks:
            self._number += breaks
            self._start = self._offset + piece.rindex(b"\n", position, end) + 1
        return end


def places(file: BinaryIO, max_bytes: int) -> Iterator[LinePosition]:
    """Yield the positions of the nonblank lines of a file.

    Raises LineError for a line longer than `max_bytes`.
    """
    scan = LineScan(file, max_bytes)
    while not scan.ended:
        yield from scan.next()


def append_line(file: FileIO, line: bytes) -> None:
    """Append a line, as a whole or not at all. Raises OSError if it cannot be written, for example on a full
    disk."""
    end, rest = file.tell(), memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(end)
        raise


def complete_lines(path: Path, read: Callable[[bytes], None] | None = None) -> int:
    """Return the number of complete lines of a results file, and pass each to `read`.

    An incomplete last line, left by a process that ended while it wrote, is cut off.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        count, end = _complete(file)
        if read is not None:
            file.seek(0)
            for text in islice(file, count):
                read(text)
        file.truncate(end)
    return count


def _complete(file: BinaryIO) -> tuple[int, int]:
    """Return the number of complete lines, and their size in bytes."""
    count = end = offset = 0
    while piece := file.read(PIECE):
        count += piece.count(b"\n")
        last = piece.rfind(b"\n")
        end = end if last < 0 else offset + last + 1
        offset += len(piece)
    return count, end
