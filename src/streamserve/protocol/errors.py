"""Errors of callers and of the server, in a form for every interface: Python, HTTP, command line."""

MAX_LINE = 1000
"""Maximum length of a message about a file, in characters."""


class RequestError(Exception):
    """A request that is refused. `field` names the invalid parameter, `status` is the HTTP status.
    `retry_after` (seconds) is set if the same request may succeed later."""

    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status
        self.retry_after = retry_after


class PromptChanged(Exception):
    """The output so far is void: its prompt has changed since."""


class CheckpointError(Exception):
    """A model folder that cannot be served. The message names the file and the field; the exit code is 2.

    The message is shortened to one line of printable text, whatever the files contain.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split()).encode("utf-8", "backslashreplace").decode()
        super().__init__(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} …")


class OtherModelError(CheckpointError):
    """A model folder whose files differ from what the other workers have loaded."""


class FleetError(Exception):
    """The fleet's runtime failed for good: this process cannot serve any more."""


class StartError(Exception):
    """A worker process that ended before it could serve."""
