"""Each dependency is declared with a lower bound. It has an upper bound if and only if its private interfaces
are used."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from streamserve import __version__
from tests.campaigns.ledger import REPOSITORY
from tests.lowest import (
    CLIENT,
    EXTRAS,
    OTHER_VERSION,
    TOOLS,
    default_torch_arguments,
    lower_bound,
    lowest,
    project,
)
from tests.sources import parse

SOURCE = REPOSITORY / "src" / "streamserve"

PRIVATE_MODULES = {
    "uvicorn": ("uvicorn.protocols", "uvicorn._types"),
}
"""Modules that are imported although their packages do not document them, so any release may change them."""

PRIVATE_NAMES = {
    "uvicorn": ("_start_asgi_task",),
    "websockets": ("conn.reader",),
    "torch": ("_reorder_linear_weight", "_linear_pointwise", "_Options", "_timeout", "_devices"),
    "triton": ("triton.knobs",),
}
"""Attributes that are used although their packages do not document them."""

MODULES = {"pyzmq": "zmq", "nixl-cu12": "nixl"}
"""Module names of packages whose module has another name."""


@cache
def trees() -> dict[Path, ast.Module]:
    files = {path: parse(path) for path in SOURCE.rglob("*.py")}
    assert len(files) > 300
    return files


def nodes() -> Iterator[ast.AST]:
    return (node for tree in trees().values() for node in ast.walk(tree))


def imported() -> set[str]:
    """Return the dotted modules that src imports from other packages; `from a import b` also counts as
    `a.b`."""
    names: set[str] = set()
    for node in nodes():
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    own = sys.stdlib_module_names | {"streamserve", "streamserve_client"}
    return {name for name in names if name.split(".")[0] not in own}


def foreign_private_attributes() -> set[str]:
    """Return the attributes with a leading underscore that src uses and does not define."""
    used: set[str] = set()
    own: set[str] = {"_exit", "_asdict"}  # These are documented: names of os and of named tuples.
    for node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and re.match(r"_[A-Za-z]", node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            (own if of_self and isinstance(node.ctx, ast.Store) else used).add(node.attr)
    return used - own


def product_requirements() -> list[Requirement]:
    return [each for group, lines in project().items() if group not in ("dev", "build") for each in lines]


def upper_bound(requirement: Requirement) -> str | None:
    return next((each.version for each in requirement.specifier if each.operator in ("<", "==")), None)


def test_what_is_imported_is_declared() -> None:
    declared = {MODULES.get(each.name, each.name.replace("-", "_")) for each in product_requirements()}
    declared.add("opentelemetry")
    assert {name.split(".")[0] for name in imported()} <= declared


def test_the_extra_of_the_client_is_the_distribution_in_this_repository() -> None:
    tables = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    (requirement,) = map(Requirement, tables["project"]["optional-dependencies"]["client"])
    assert requirement.name == tomllib.loads(CLIENT.read_text())["project"]["name"]
    assert Version(__version__) in requirement.specifier
    assert {each.name for each in project()["client"]} == {"httpx"}


@pytest.mark.parametrize("package", sorted({*PRIVATE_MODULES, *PRIVATE_NAMES}))
def test_a_package_whose_private_interfaces_are_used_has_an_upper_bound(package: str) -> None:
    requirements = [each for each in product_requirements() if each.name == package]
    assert requirements
    assert all(upper_bound(each) for each in requirements)


def test_other_packages_have_none() -> None:
    private = {
        *PRIVATE_MODULES,
        *PRIVATE_NAMES,
        "ziglang",
    }  # ziglang: a compiler whose versions differ in code
    assert {each.name for each in product_requirements() if upper_bound(each)} <= private


def test_private_interfaces_are_listed() -> None:
    listed = {name for names in PRIVATE_NAMES.values() for name in names}
    assert foreign_private_attributes() <= listed
    modules = tuple(module for names in PRIVATE_MODULES.values() for module in names)
    private = {name for name in imported() if re.search(r"(^|\.)_[A-Za-z]", name)}
    assert private
    assert all(name.startswith(modules) for name in private)


def test_what_is_listed_is_used() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in trees())
    for names in PRIVATE_NAMES.values():
        for name in names:
            assert name in text
    for modules in PRIVATE_MODULES.values():
        for module in modules:
            assert any(name.startswith(module) for name in imported()), module


def test_every_requirement_has_a_lower_bound_and_a_reason() -> None:
    for group, requirements in project().items():
        for requirement in requirements:
            assert lower_bound(requirement), (group, requirement)
    lines = (REPOSITORY / "pyproject.toml").read_text().splitlines()
    begin, end = lines.index("dependencies = ["), lines.index("[project.scripts]")
    requirement_lines = [line for line in lines[begin:end] if ">=" in line or "==" in line]
    assert len(requirement_lines) > 40
    assert [line for line in requirement_lines if "# " not in line] == []


def test_a_package_has_one_bound_in_all_groups() -> None:
    bounds: dict[str, set[str]] = {}
    for requirements in project().values():
        for requirement in requirements:
            bounds.setdefault(requirement.name, set()).add(str(requirement.specifier))
    for line in (REPOSITORY / "tests" / "gpu" / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            bounds[requirement.name].add(str(requirement.specifier))
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def test_the_lowest_versions_are_those_of_the_project_and_its_extras() -> None:
    groups = project()
    versions = lowest(groups)
    assert versions["uvicorn"] == lower_bound(next(e for e in groups["project"] if e.name == "uvicorn"))
    missing = {each.name for name in ("project", *EXTRAS) for each in groups[name]} - versions.keys()
    assert {name.replace("_", "-") for name in missing} - versions.keys() == {OTHER_VERSION}
    assert {each.name for each in groups["dev"]} >= set(TOOLS)
    assert not set(TOOLS) & versions.keys()


def test_commands_install_a_torch_within_its_bounds() -> None:
    (requirement,) = (each for each in project()["project"] if each.name == OTHER_VERSION)
    for text in (default_torch_arguments(), (REPOSITORY / "Containerfile").read_text()):
        (version,) = re.findall(r"torch==([\d.]+)", text)
        assert Version(version) in requirement.specifier
    lower, upper = lower_bound(requirement), upper_bound(requirement)
    command = f"pip install 'torch>={lower},<{upper}'"
    assert command in (REPOSITORY / "docs" / "operations" / "installing.md").read_text()
