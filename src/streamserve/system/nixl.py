"""Detection of NIXL, an optional dependency because of its size."""

from importlib.util import find_spec

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Packages with NIXL's Python bindings; both work without CUDA."""
NIXL_MISSING = 'NIXL is not installed: pip install "streamserve[nixl]"'


def nixl_package() -> str | None:
    """Return the installed package among PACKAGES; None if there is none."""
    return next((package for package in PACKAGES if find_spec(package)), None)
