"""Errors of callers and of the server, in a form for every interface: Python, HTTP, command line."""

MAX_LINE = 1000
"""Maximum length of a message about a file, in characters."""


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code of errors about prompts that are too long. Agents then shorten the conversation."""


class RequestError(Exception):
    """A request that is refused. `field` names the invalid parameter, `status` is the HTTP status.
    `retry_after` (seconds) is set if the same request may succeed later. `code` is OpenAI's code of the
    error, for programs."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        status: int = 400,
        retry_after: float | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status
        self.retry_after = retry_after
        self.code = code


def context_overflow(
    tokens: int, maximum: int, context: int, field: str, *, at_least: bool = False
) -> RequestError:
    """Return the error about a prompt of `tokens` tokens where at most `maximum` fit in the `context`.

    The error has the words by which clients of OpenAI's and of Anthropic's API recognize it. `at_least`: the
    prompt was not tokenized, and has `tokens` tokens or more.
    """
    output = ", including the output" if maximum < context else ""
    return RequestError(
        f"prompt is too long: {'at least ' if at_least else ''}{tokens} tokens > {maximum} maximum. This "
        f"model's maximum context length is {context} tokens{output}: shorten the prompt",
        field=field,
        code=CONTEXT_LENGTH_EXCEEDED,
    )


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
