"""What a caller did wrong, or we could not do, in a form every door can tell: Python, HTTP, command line."""

MAX_LINE = 1000
"""Characters of a message about a file."""


class RequestError(Exception):
    """A request that is refused. `field` names the offending parameter, `status` is the HTTP status that
    says it best, `retry_after` (seconds) is set when the same request may succeed later."""

    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status
        self.retry_after = retry_after


class PromptChanged(Exception):
    """What was answered so far is withdrawn: it was of a prompt that has changed since."""


class CheckpointError(Exception):
    """A model folder that cannot be served. The message names the file and the field; exit code 2.

    It is one line of printable text, and short, whatever the files hold."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split()).encode("utf-8", "backslashreplace").decode()
        super().__init__(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} …")


class FleetError(Exception):
    """The part that manages requests and workers failed for good: this process cannot serve any more."""


class StartError(Exception):
    """A worker process that ended before it could serve."""
