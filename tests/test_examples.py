"""The examples and the code in the docs run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Served, serving

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DOCUMENTS = EXAMPLES / "documents"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("embedded", "--threads", "1") as running:
        yield running


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_offline() -> None:
    assert run("offline.py").count("tokens, ") == 3


def test_seeded() -> None:
    assert "equal:         True" in run("seeded.py")


def test_openai_client(served: Served) -> None:
    assert "tokens)" in run("openai_client.py", served.url)


def test_folder_stream(served: Served) -> None:
    *found, answer, times = run("folder_stream.py", str(EXAMPLES / "documents"), served.url).splitlines()
    assert [line.partition(":")[0] for line in found] == sorted(path.name for path in DOCUMENTS.iterdir())
    computed = [int(re.findall(r"\d+ of \d+ earlier", line)[0].split()[0]) for line in found]
    assert computed[-1] > computed[0] > 0, "documents are computed while others are being found"
    assert answer == "Anna Keller opened a new library in Lindow on Monday. It cost 14 thousand dollars."
    assert re.fullmatch(r"time to the first token: \d+ ms; sent at the end: \d+ ms", times)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/design/simulation.md", "docs/guides/structured-output.md"]
)
def test_code_in_the_docs_runs(page: str) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip()


def test_every_page_with_code_is_run() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(str(page.relative_to(ROOT)) in here for page in pages if "```python" in page.read_text())


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{example.name}"' in here for example in EXAMPLES.glob("*.py"))
