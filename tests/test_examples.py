"""The examples run as printed in them."""

import subprocess
import sys
from pathlib import Path

from tests.serving import serving

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_offline() -> None:
    assert run("offline.py").count("tokens, ") == 3


def test_seeded() -> None:
    assert "the same:      True" in run("seeded.py")


def test_openai_client() -> None:
    with serving("embedded", "--threads", "1") as served:
        assert "tokens)" in run("openai_client.py", served.url)


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text()
    assert all(f'"{example.name}"' in here for example in EXAMPLES.glob("*.py"))
