"""The tables that pages may name: each function renders one from its result files."""

from . import (
    cluster,
    draft_service,
    engines,
    gpu,
    installing,
    kernels,
    pairs,
    settings,
    small,
    speculation,
    stamps,
    streams,
    targets,
    widths,
    workers,
)
from .base import TABLES

__all__ = [
    "TABLES",
    "cluster",
    "draft_service",
    "engines",
    "gpu",
    "installing",
    "kernels",
    "pairs",
    "settings",
    "small",
    "speculation",
    "stamps",
    "streams",
    "targets",
    "widths",
    "workers",
]
