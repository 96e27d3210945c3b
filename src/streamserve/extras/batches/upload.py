"""Receives a file as multipart/form-data: it is written to disk as it arrives, within limits."""

from dataclasses import dataclass, field
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from streamserve.extras.batches.folder import BatchFolder
from streamserve.protocol.errors import RequestError

_MAX_VALUE = 1024
"""Maximum size of a field other than the file, in bytes."""
_MAX_FIELDS = 16
_MAX_NAME = 255
_HEADERS = 2048
"""Maximum size of the headers of one part of a form, in bytes."""


@dataclass
class Upload:
    """A received form: its fields, the name of its file (None: no file), and the file's size in bytes."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0


async def receive(request: Request, folder: BatchFolder, target: BinaryIO, max_bytes: int) -> Upload:
    """Write the file of a form to `target`, counted in `folder`.

    Raises RequestError if the form is no upload of a batch's requests, or if the file is larger than
    `max_bytes` or than the free space of the folder. Raises OSError if it cannot be written. The count is
    undone in both cases.
    """
    too_large = RequestError(
        f"the file is larger than {max_bytes} bytes, which is the limit (max_batch_file_bytes)", status=413
    )
    largest = max_bytes + _MAX_FIELDS * (_MAX_VALUE + _HEADERS)
    if int(request.headers.get("content-length", 0)) > largest:
        raise too_large
    form = _Form(folder, target, max_bytes, too_large)
    try:
        parser = _parser(request, form)
        async for chunk in request.stream():
            parser.write(chunk)
        parser.finalize()
        if not form.ended:
            raise RequestError("the form is incomplete")
        _check(form.upload)
        target.flush()
    except MultipartParseError as error:
        folder.release(form.upload.size)
        raise RequestError(f"the form cannot be read: {error}") from error
    except BaseException:
        folder.release(form.upload.size)
        raise
    return form.upload


def _check(upload: Upload) -> None:
    if upload.filename is None:
        raise RequestError("file is required", field="file")
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise RequestError("purpose is required: batch", field="purpose")
    if purpose != "batch":
        raise RequestError(f"purpose must be batch, not {purpose[:40]!r}", field="purpose")
    other = upload.fields.keys() - {"purpose"}
    if other:
        name = min(other)
        raise RequestError(f"{name} is not supported: leave it out", field=name)


def _parser(request: Request, form: "_Form") -> MultipartParser:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError("send the file as multipart/form-data, with the fields file and purpose")
    callbacks = {
        "on_part_begin": form.begin,
        "on_header_field": form.header_field,
        "on_header_value": form.header_value,
        "on_header_end": form.header_end,
        "on_headers_finished": form.headers_finished,
        "on_part_data": form.data,
        "on_part_end": form.end,
        "on_end": form.finish,
    }
    return MultipartParser(boundary, callbacks)  # type: ignore[arg-type]


class _Form:
    """Takes the parts of a form."""

    def __init__(
        self, folder: BatchFolder, target: BinaryIO, max_bytes: int, too_large: RequestError
    ) -> None:
        self.upload = Upload()
        self.ended = False
        self._folder = folder
        self._target = target
        self._max_bytes = max_bytes
        self._too_large = too_large
        self._parts = 0
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = b"", b""
        self._name = ""
        self._is_file = False
        self._text = b""

    def begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_FIELDS:
            raise RequestError(f"the form has more than {_MAX_FIELDS} fields")
        self._headers, self._text, self._is_file = {}, b"", False

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:_MAX_NAME]
        if self._name != "file":
            return
        if self.upload.filename is not None:
            raise RequestError("the form has more than one file", field="file")
        self._is_file = True
        self.upload.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:_MAX_NAME]

    def data(self, data: bytes, start: int, end: int) -> None:
        size = end - start
        if not self._is_file:
            self._text += data[start:end]
            if len(self._text) > _MAX_VALUE:
                raise RequestError(f"{self._name} is longer than {_MAX_VALUE} bytes", field=self._name)
            return
        if self.upload.size + size > self._max_bytes:
            raise self._too_large
        self._folder.reserve(size)
        self.upload.size += size
        self._target.write(data[start:end])

    def end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name] = self._text.decode("utf-8", "replace")

    def finish(self) -> None:
        self.ended = True
