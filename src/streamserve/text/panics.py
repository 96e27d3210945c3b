"""Panics of the library `tokenizers` as errors of a request."""

from collections.abc import Iterator
from contextlib import contextmanager

from streamserve.protocol.errors import RequestError


@contextmanager
def refusing_panics() -> Iterator[None]:
    """Raise RequestError if the library panics within the block: a pattern of a checkpoint's tokenizer takes
    too many steps for a text. A panic is no Exception, so it would end the task that serves the request, or
    all batches."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"this model's tokenizer cannot encode the text: {error}") from error
