"""Commands that compute nothing work where torch cannot be imported."""

import subprocess
import sys

import pytest

CLIENT = "import streamserve.client"
RUN = "from streamserve.__main__ import main; main()"
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None  # importing it raises ImportError
sys.argv[0] = "streamserve"
try:
    {code}
finally:
    print(sorted(name for name in sys.modules if name.startswith("streamserve.execution")), file=sys.stderr)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH.format(code=code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_client_needs_no_torch() -> None:
    done = run(CLIENT)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--version"], "0."),
        (["version"], "0."),
        (["--help"], "Commands:"),
        (["serve", "--help-all"], "--kernel-path"),
        (["bench", "serve", "--help"], "--goodput"),
        (["serve", "--print-config"], "kv_cache_dtype"),
    ],
)
def test_a_command_that_computes_nothing_needs_no_torch(arguments: list[str], printed: str) -> None:
    done = run(RUN, *arguments)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_benchmark_of_a_server_needs_no_torch() -> None:
    done = run(RUN, "bench", "serve", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1")
    assert done.returncode == 2
    assert "127.0.0.1:1" in done.stderr
    assert "torch" not in done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
