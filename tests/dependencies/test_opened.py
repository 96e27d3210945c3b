"""Closures against what tests open when they run."""

import shutil

import pytest

from tests.dependencies import ROOT, Tree, read
from tests.dependencies.opened import opened_by
from tests.dependencies.tree import CACHE


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy of the repository: nothing else opens its files meanwhile."""
    folder = tmp_path_factory.mktemp("repository")
    for name in (*read().files, CACHE.relative_to(ROOT)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return read(folder, folder / CACHE.relative_to(ROOT))


@pytest.mark.parametrize(
    ("test", "read_by_it"),
    [
        ("tests/api/test_recorded.py", "tests/api/recorded/langchain_chat.json"),
        ("tests/cli/test_locale.py", "src/streamserve/cli/main.py"),
    ],
)
def test_everything_that_a_test_opens_is_in_its_closure(copy: Tree, test: str, read_by_it: str) -> None:
    """Also what the processes open that it starts."""
    opened, output = opened_by(copy, test)
    assert " passed" in output, output[-2000:]
    assert {test, read_by_it, "src/streamserve/__init__.py"} <= opened
    assert opened <= set(copy.closure([test]))
