"""Routes of files and batches: /v1/files, /v1/batches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from streamserve.api.context import AppContext
from streamserve.api.http.auth import caller_of
from streamserve.api.http.body import read_request
from streamserve.api.http.descriptors import Descriptors
from streamserve.api.http.ignored_fields import OtherFields
from streamserve.api.http.pages import PARAMETERS, ListReply, list_reply, page_of
from streamserve.api.routes import BoundRoute, Operation, Route, json_response
from streamserve.extras.batches.folder import BatchFolder, new_name, writing
from streamserve.extras.batches.lines import ENDPOINTS
from streamserve.extras.batches.schemas import (
    MAX_METADATA,
    WINDOW,
    BatchReply,
    BatchRequest,
    DeletedFile,
    FileReply,
    StoredFile,
)
from streamserve.extras.batches.service import BatchService
from streamserve.extras.batches.upload import Upload, receive
from streamserve.protocol.errors import RequestError

_MAX_FILES_LISTED = 10_000
_MAX_BATCHES_LISTED = 100
_MAX_METADATA_KEY, _MAX_METADATA_VALUE = 64, 512
_OTHER = OtherFields(refused={"output_expires_after": ()})
_JSON_LINES = "application/jsonl"


@dataclass(frozen=True)
class BatchContext:
    """The context of the routes of batches. Without a `folder` they are disabled. Requests of batches use the
    `endpoints`."""

    context: AppContext
    endpoints: Sequence[BoundRoute]
    folder: BatchFolder | None = None

    @cached_property
    def service(self) -> BatchService:
        """The batch service. Raises RequestError (404) if there is no folder for it."""
        if self.folder is None:
            raise RequestError(
                "files and batches are disabled: start the server with --batch-folder FOLDER", status=404
            )
        return BatchService(self.context, self.endpoints, self.folder)


def batch_context(context: AppContext, endpoints: Sequence[BoundRoute]) -> BatchContext:
    """Return the context of the routes. Raises FolderError if the folder cannot be used."""
    settings = context.settings
    if settings.batch_folder is None:
        return BatchContext(context, endpoints)
    folder = BatchFolder(Path(settings.batch_folder), settings.max_batch_folder_bytes)
    return BatchContext(context, endpoints, folder)


async def create_file(context: BatchContext, request: Request) -> Response:
    """Store the file of a form. Raises RequestError if the form is invalid, too large, or cannot be
    written."""
    folder = context.service.folder
    folder.check_number()
    name = new_name("file-")
    with writing():
        upload = await _received(context, request, folder.content(name))
        file = FileReply(
            id=name,
            bytes=upload.size,
            created_at=int(time.time()),
            filename=upload.filename or "file.jsonl",
            purpose="batch",
        )
        try:
            folder.put_file(StoredFile(owner=caller_of(request), file=file))
        except OSError:
            folder.discard(name)
            raise
    return json_response(file)


async def _received(context: BatchContext, request: Request, path: Path) -> Upload:
    """Write the file of a form to `path`, as a whole or not at all."""
    part = path.with_suffix(".part")
    try:
        with context.context.descriptors.file(), part.open("wb") as target:
            limit = context.context.settings.max_batch_file_bytes
            upload = await receive(request, context.service.folder, target, limit)
        part.replace(path)
        return upload
    finally:
        part.unlink(missing_ok=True)


async def list_files(context: BatchContext, request: Request) -> Response:
    """Return a page of the caller's files. Raises RequestError naming an invalid parameter."""
    owner, purpose = caller_of(request), request.query_params.get("purpose")
    stored = context.service.folder.files.values()
    files = [
        (each.file.id, each.file)
        for each in stored
        if each.owner == owner and purpose in (None, each.file.purpose)
    ]
    return json_response(list_reply(*page_of(request, _MAX_FILES_LISTED, _MAX_FILES_LISTED).of(files)))


async def retrieve_file(context: BatchContext, request: Request) -> Response:
    """Return a file's record. Raises RequestError (404) if there is none."""
    return json_response(_file(context, request).file)


async def file_content(context: BatchContext, request: Request) -> Response:
    """Return a file's content. Raises RequestError (404) if there is none."""
    stored = _file(context, request)
    return _Content(context.context.descriptors, context.service.folder.content(stored.file.id))


class _Content(FileResponse):
    """A response that counts a descriptor while it sends a file. Raises RequestError (503) if too many are
    open."""

    def __init__(self, descriptors: Descriptors, path: Path) -> None:
        super().__init__(path, media_type=_JSON_LINES)
        self._descriptors = descriptors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._descriptors.file():
            await super().__call__(scope, receive, send)


async def delete_file(context: BatchContext, request: Request) -> Response:
    """Delete a file. Raises RequestError (404) if there is none, (409) if a batch reads it, (507) if the
    folder cannot be written."""
    folder, stored = context.service.folder, _file(context, request)
    if any(batch.batch.input_file_id == stored.file.id for batch in folder.unfinished()):
        raise RequestError("a batch that has not ended reads this file: cancel it first", status=409)
    with writing():
        folder.delete_file(stored.file.id)
    return json_response(DeletedFile(id=stored.file.id))


async def create_batch(context: BatchContext, request: Request) -> Response:
    """Create a batch. Raises RequestError naming the field at fault."""
    service = context.service
    body = await read_request(request, context.context, BatchRequest, _OTHER)
    if body.endpoint not in ENDPOINTS:
        raise RequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", field="endpoint")
    if body.completion_window != WINDOW:
        raise RequestError(f"completion_window must be {WINDOW}", field="completion_window")
    _check_metadata(body.metadata or {})
    owner = caller_of(request)
    stored = service.folder.file(body.input_file_id, owner, "input_file_id")
    if stored.file.purpose != "batch":
        raise RequestError("input_file_id: this file is the output of a batch", field="input_file_id")
    with writing():
        return json_response(service.create(owner, body))


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata may have at most {MAX_METADATA} entries", field="metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
            raise RequestError(
                f"metadata: keys have at most {_MAX_METADATA_KEY} characters, values {_MAX_METADATA_VALUE}",
                field="metadata",
            )


async def list_batches(context: BatchContext, request: Request) -> Response:
    """Return a page of the caller's batches. Raises RequestError naming an invalid parameter."""
    service, owner = context.service, caller_of(request)
    batches = [
        (stored.batch.id, service.reply(stored))
        for stored in service.folder.batches.values()
        if stored.owner == owner
    ]
    return json_response(list_reply(*page_of(request, 20, _MAX_BATCHES_LISTED).of(batches)))


async def retrieve_batch(context: BatchContext, request: Request) -> Response:
    """Return a batch. Raises RequestError (404) if there is none."""
    service = context.service
    return json_response(service.reply(service.folder.batch(request.path_params["id"], caller_of(request))))


async def cancel_batch(context: BatchContext, request: Request) -> Response:
    """Cancel a batch. Raises RequestError (404) if there is none, (409) if it has ended."""
    service = context.service
    stored = service.folder.batch(request.path_params["id"], caller_of(request))
    with writing():
        return json_response(await service.cancel(stored))


def _file(context: BatchContext, request: Request) -> StoredFile:
    return context.service.folder.file(request.path_params["id"], caller_of(request))


_PURPOSE: dict[str, Any] = {
    "name": "purpose",
    "in": "query",
    "description": "return only files with this purpose",
    "schema": {"type": "string"},
}
_EXAMPLE = {"input_file_id": "file-…", "endpoint": ENDPOINTS[0], "completion_window": WINDOW}

BATCH_ROUTES: tuple[Route[BatchContext], ...] = (
    Route(
        "POST",
        "/v1/files",
        create_file,
        Operation(
            "Upload the requests of a batch, as multipart/form-data with the fields file and purpose",
            reply=FileReply,
            errors=(400, 404, 413, 507),
        ),
    ),
    Route(
        "GET",
        "/v1/files",
        list_files,
        Operation("The files", reply=ListReply, errors=(400, 404), parameters=(*PARAMETERS, _PURPOSE)),
    ),
    Route("GET", "/v1/files/{id}", retrieve_file, Operation("A file", reply=FileReply, errors=(404,))),
    Route(
        "GET",
        "/v1/files/{id}/content",
        file_content,
        Operation("The content of a file", media=_JSON_LINES, errors=(404,)),
    ),
    Route(
        "DELETE",
        "/v1/files/{id}",
        delete_file,
        Operation("Delete a file", reply=DeletedFile, errors=(404, 409, 507)),
    ),
    Route(
        "POST",
        "/v1/batches",
        create_batch,
        Operation(
            "Answer the requests of a file in the background",
            BatchRequest,
            BatchReply,
            others=_OTHER,
            errors=(507,),
            example=_EXAMPLE,
        ),
    ),
    Route(
        "GET",
        "/v1/batches",
        list_batches,
        Operation("The batches", reply=ListReply, errors=(400, 404), parameters=PARAMETERS),
    ),
    Route("GET", "/v1/batches/{id}", retrieve_batch, Operation("A batch", reply=BatchReply, errors=(404,))),
    Route(
        "POST",
        "/v1/batches/{id}/cancel",
        cancel_batch,
        Operation("End a batch with the results that it has", reply=BatchReply, errors=(404, 409, 507)),
    ),
)
