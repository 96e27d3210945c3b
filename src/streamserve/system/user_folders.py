"""The user's folders for caches and for state, by the XDG base directory specification.

Without a home folder (in a container, or for a user id without an account), they are in the folder for
temporary files.
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for files that can be created again if they are lost: compiled kernels, profiles."""
    return base_folder("XDG_CACHE_HOME", ".cache", environ) / "streamserve"


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for records of what happened: crash reports."""
    return base_folder("XDG_STATE_HOME", ".local/state", environ) / "streamserve"


def base_folder(variable: str, default: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder named by an environment variable if its path is absolute, else the default below the
    user's home."""
    given = Path(environ.get(variable, ""))
    return given if given.is_absolute() else _home() / default


def _home() -> Path:
    with contextlib.suppress(RuntimeError):  # there is neither HOME nor an account
        if (home := Path.home()).is_absolute():
            return home
    return Path(tempfile.gettempdir()) / f"home-of-user-{os.geteuid()}"
