"""/v1/files and /v1/batches: requests and replies, as OpenAI defines them."""

from typing import Annotated, Any, Literal

import msgspec

from streamserve.api.openai.schemas import about
from streamserve.extras.batches.lines import ENDPOINTS

WINDOW = "24h"
WINDOW_SECONDS = 86_400

MAX_METADATA = 16
"""Maximum number of entries of a batch's metadata."""

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
FINAL: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileReply(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: str = "processed"
    expires_at: int | None = None


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is no longer stored."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, about("an uploaded file with one request in JSON per line")]
    endpoint: Annotated[str, about("the route that all requests use", enum=list(ENDPOINTS))]
    completion_window: Annotated[
        str, about("the time within which the batch should be answered", enum=[WINDOW])
    ]
    metadata: Annotated[
        dict[str, str] | None,
        about("notes of the caller, returned with the batch", maxProperties=MAX_METADATA),
    ] = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error that made a batch fail. `line` is the line of the input file at fault, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The errors that made a batch fail."""

    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of requests of a batch, of answered requests, and of failed ones."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are in Unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record of a file. `owner` is the id of the caller that created it."""

    owner: str
    file: FileReply


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record of a batch. `output` and `error` are the ids of its result files. They exist once the
    batch has ended, unless they would be empty."""

    owner: str
    batch: BatchReply
    output: str
    error: str

    def changed(self, **fields: Any) -> "StoredBatch":
        """Return a copy in which these fields of the batch are changed."""
        return msgspec.structs.replace(self, batch=msgspec.structs.replace(self.batch, **fields))
