"""Errors of the hub, as one line that says what to do. No message contains a token."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from streamserve.hub.names import HubName
from streamserve.protocol.errors import CheckpointError

TOKEN_ADVICE = "give a token with --token or HF_TOKEN"


class Unreachable(CheckpointError):
    """The hub does not answer, or the process is in offline mode. Cached models can still be used."""


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """Convert every error of a request about `name` into CheckpointError, or into Unreachable if the hub
    cannot be reached."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # by version, huggingface_hub raises errors of three HTTP libraries
        raise _refusal(name, error) from error


def _refusal(name: HubName, error: Exception) -> CheckpointError:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        advice = f"{TOKEN_ADVICE} of an account that was granted access on the model's page"
        return CheckpointError(f"{name}: access to this model is restricted ({status}): {advice}")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{name}: the repository has no revision {name.revision or 'main'}")
    if isinstance(error, errors.RepositoryNotFoundError):
        advice = f"check the name, or {TOKEN_ADVICE}"
        return CheckpointError(f"{name}: there is no such repository on the hub, or it is private: {advice}")
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"{name} is not a name on the hub: {_first_line(error)}")
    if status in (401, 403):
        return CheckpointError(f"{name}: the hub refuses the token ({status}): {TOKEN_ADVICE}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return Unreachable(f"{name}: HF_HUB_OFFLINE forbids access to the hub")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return CheckpointError(f"{name} cannot be written to the hub's cache: {error.strerror}")
    return Unreachable(f"{name}: the hub cannot be reached: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
