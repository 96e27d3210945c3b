"""Run the suite's core with the lowest version of each dependency that pyproject.toml allows.

    python -m tests.lowest                   install them if needed, import each, run the core
    python -m tests.lowest -- -k websocket   the same, with arguments for pytest

The versions are installed in a virtual environment in build/lowest, which is made again when they change. Two
kinds of packages have other versions:

- torch is the one of the Makefile (TORCH_PIP_ARGS): its builds are large, and few of them are for CPUs only.
- Test tools are the newest that fit.

Not installed: packages for devices and clusters (cuda, nixl, ray), which the core does not use.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.campaigns.ledger import REPOSITORY

FOLDER = REPOSITORY / "build" / "lowest"
PYTHON = FOLDER / "bin" / "python"
MADE = FOLDER / "made.json"
"""The requirements that the environment was made from; absent while it is incomplete."""

CLIENT = REPOSITORY / "client/pyproject.toml"
OTHER_VERSION = "torch"
EXTRAS = ("client", "bench", "otel", "mistral", "odd-tokenizers", "wheel", "docs")
TOOLS = (
    "pytest", "pytest-asyncio", "pytest-randomly", "pytest-timeout", "pytest-xdist", "hypothesis", "openai",
    "anthropic", "psutil", "jsonschema", "trustme", "gguf",
)  # fmt: skip
"""Packages of the extra `dev` that the core needs although the product does not."""

CORE = (
    "tests/api",
    "tests/baselines",
    "tests/cli",
    "tests/engine",
    "tests/execution/formats/test_checkpoint.py",
    "tests/execution/compute/test_grammar.py",
    "tests/execution/loading/test_load.py",
    "tests/extras/anthropic",
    "tests/extras/batches",
    "tests/extras/bench",
    "tests/extras/ollama",
    "tests/extras/responses",
    "tests/extras/web_page",
    "tests/fleet",
    "tests/hub",
    "tests/protocol",
    "tests/scheduling",
    "tests/speculation",
    "tests/test_client.py",
    "tests/test_draft_service.py",
    "tests/test_llm.py",
    "tests/test_serve.py",
    "tests/text",
    "tests/transfer",
)
"""Tests that use each dependency: HTTP, WebSockets, TLS, clients, a real server, messages between processes,
stored weights, tokenizers, grammars, the command line, downloads."""

IGNORED = "--ignore-glob=*/test_page_*"
"""Tests of the page in a browser, which are left out."""

IMPORT_ALL = """
import importlib, importlib.metadata, sys
from packaging.utils import canonicalize_name
modules = importlib.metadata.packages_distributions()
for name in sys.argv[1:]:
    owned = [module for module, owners in modules.items() if name in map(canonicalize_name, owners)]
    assert owned, f"{name} has no module"
    for module in owned:
        if module.isidentifier() and not module.startswith("_"):
            importlib.import_module(module)
"""
"""A program that imports the modules of packages."""


def project() -> dict[str, list[Requirement]]:
    """Return the requirements of pyproject.toml by group: build, project, and each extra.

    The extra `client` is a distribution of this repository: the group has the requirements of that one.
    """
    tables = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    client = tomllib.loads(CLIENT.read_text())
    groups = {
        "build": tables["build-system"]["requires"],
        "project": tables["project"]["dependencies"],
        **tables["project"]["optional-dependencies"],
        "client": client["project"]["dependencies"],
    }
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


def lower_bound(requirement: Requirement) -> str:
    """Return the lowest version that a requirement allows."""
    (bound,) = (each.version for each in requirement.specifier if each.operator in (">=", "=="))
    return bound


def lowest(groups: Mapping[str, list[Requirement]]) -> dict[str, str]:
    """Return by package the lowest versions that the build, the project and the extras allow."""
    requirements = [each for name in ("build", "project", *EXTRAS) for each in groups[name]]
    return {
        canonicalize_name(each.name): lower_bound(each) for each in requirements if each.name != OTHER_VERSION
    }


def default_torch_arguments() -> str:
    """Return the default arguments for pip to install torch."""
    default = re.search(r"^TORCH_PIP_ARGS \?= (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert default
    return default[1]


def torch_arguments() -> list[str]:
    """Return the arguments for pip to install torch."""
    return os.environ.get("TORCH_PIP_ARGS", default_torch_arguments()).split()


def make(versions: Mapping[str, str], tools: Iterable[Requirement]) -> None:
    """Make the environment, unless it exists with the same requirements."""
    wanted = [str(each) for each in tools]
    made = {"python": sys.version, "torch": torch_arguments(), "versions": dict(versions), "tools": wanted}
    if MADE.exists() and json.loads(MADE.read_text()) == made:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    subprocess.run([*pip, "setuptools", *torch_arguments()], check=True)
    package = f"{REPOSITORY}[{','.join(EXTRAS)}]"
    editable = ("--no-build-isolation", "--editable", CLIENT.parent, "--editable", package)
    subprocess.run([*pip, *editable, *wanted], check=True)
    MADE.write_text(json.dumps(made, indent=1) + "\n")


def installed() -> dict[str, str]:
    """Return the versions in the environment by package."""
    command = [PYTHON, "-m", "pip", "list", "--format", "json"]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {canonicalize_name(each["name"]): each["version"] for each in listed}


def main() -> int:
    """Run the command; returns pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.lowest", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=REPOSITORY / "build" / "verify" / "lowest.json")
    parser.add_argument("arguments", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    groups = project()
    versions = lowest(groups)
    make(versions, [each for each in groups["dev"] if each.name in TOOLS])
    there = installed()
    higher = {name for name, bound in versions.items() if Version(there[name]) != Version(bound)}
    assert not higher, f"not the lowest versions: {higher}"
    print("lowest versions:", ", ".join(f"{name} {there[name]}" for name in versions))
    print(f"{OTHER_VERSION}: {there[OTHER_VERSION]}", flush=True)
    subprocess.run([PYTHON, "-m", "pip", "check"], check=True)
    subprocess.run([PYTHON, "-c", IMPORT_ALL, *versions], check=True)
    pytest = [PYTHON, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [*pytest, "--results", arguments.results, IGNORED, *CORE, *arguments.arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
