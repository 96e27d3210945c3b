"""Whether NIXL is installed: it is large, so it is an extra."""

from importlib.util import find_spec

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""What may bind it; both work without CUDA."""
NIXL_MISSING = 'NIXL is not installed: pip install "streamserve[nixl]"'


def nixl_package() -> str | None:
    """The installed package of PACKAGES, None without one."""
    return next((package for package in PACKAGES if find_spec(package)), None)
