from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Served, serving


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Run third-party clients only with --full: `make verify` installs them."""
    return True if collection_path.name == "test_clients.py" and not config.getoption("--full") else None


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A real server with the packaged model."""
    with serving(
        "embedded", "--threads", "1", "--served-model-name", "small", "--tool-parser", "hermes"
    ) as running:
        yield running
