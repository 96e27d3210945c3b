"""The folder of workers' crash reports, and their limits."""

from collections.abc import Mapping
from pathlib import Path

from streamserve.system.user_folders import state_folder

MAX_REPORTS = 20
"""Maximum number of reports; a new one replaces the oldest."""

MAX_REPORT_BYTES = 256 << 10


def crash_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of crash reports: $XDG_STATE_HOME/streamserve/crashes, by default
    ~/.local/state/streamserve/crashes."""
    return state_folder(environ) / "crashes"
