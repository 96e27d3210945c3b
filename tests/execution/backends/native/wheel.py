"""Find the wheel that `make wheel` has built from the current sources."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
TAG = "py3-none-manylinux_2_28_x86_64"


def built_wheel() -> Path:
    """Return the wheel in dist/. Skips the test if there is none, or if it was built from other sources."""
    wheel = next((ROOT / "dist").glob(f"*-{TAG}.whl"), None)
    if wheel is None:
        pytest.skip("there is no wheel: make wheel")
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if name.startswith("streamserve/")}
        sources = {
            path.relative_to(ROOT / "src").as_posix(): path
            for path in (ROOT / "src" / "streamserve").rglob("*")
            if path.suffix in (".py", ".cpp", ".h")
        }
        if any(
            name not in packaged or archive.read(name) != path.read_bytes() for name, path in sources.items()
        ):
            pytest.skip("the wheel is of other sources: make wheel")
    return wheel
