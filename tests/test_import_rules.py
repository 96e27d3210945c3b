"""Import rules: which package may import which, which packages stay free of tensors, and what tests may
share."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import parse

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SOURCE = ROOT / "src" / "streamserve"

ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "contracts": {"protocol"},
    "system": {"protocol"},
    "speculation": {"contracts", "protocol"},
    "scheduling": {"contracts", "speculation"},
    "baselines": {"contracts", "scheduling", "speculation"},
    "engine": {"contracts", "scheduling", "speculation", "protocol"},
    "execution": {"contracts", "gguf", "protocol", "system"},
    "gguf": {"protocol"},
    "hub": {"gguf", "protocol"},
    "text": {"contracts", "gguf", "protocol"},
    "fleet": {"contracts", "scheduling", "protocol", "system"},
    "transfer": {"contracts", "protocol", "system"},
    "draft_service": {"system", "contracts", "speculation", "protocol"},
    "workers": {
        "baselines",
        "contracts",
        "draft_service",
        "engine",
        "execution",
        "speculation",
        "text",
        "transfer",
        "protocol",
        "system",
    },
    "simulate": {"baselines", "contracts", "fleet", "engine", "speculation", "protocol"},
    "api": {"contracts", "fleet", "settings", "text", "protocol", "system"},
    "settings": {"baselines", "contracts", "fleet", "gguf", "hub", "protocol", "system"},
    "llm": {"baselines", "settings", "fleet", "text", "protocol", "system"},
    "cli": {
        "api",
        "draft_service",
        "execution",
        "fleet",
        "llm",
        "settings",
        "protocol",
        "system",
    },
    "embedded": set(),
    "extras.anthropic": {"api", "protocol", "text"},
    "extras.batches": {"api", "cli", "llm", "protocol", "settings"},
    "extras.bench": {"cli", "settings"},
    "extras.cluster": {"cli", "fleet", "llm", "protocol", "settings", "system"},
    "extras.models": {"cli", "execution", "hub", "protocol", "settings", "text"},
    "extras.nixl": {"contracts", "protocol", "system", "transfer"},
    "extras.ollama": {"api", "protocol", "text"},
    "extras.pooling": {"api", "contracts", "protocol", "text"},
    "extras.responses": {"api", "protocol", "text"},
    "extras.web_page": {"api", "protocol"},
}
"""The packages that each package may import. Every package may import the top-level package (the version).

Each optional part is a package by itself. No rule names one: see COMPOSITION_ROOTS.
"""

COMPOSITION_ROOTS: dict[str, set[str]] = {
    "api/app.py": {"anthropic", "batches", "ollama", "pooling", "responses", "web_page"},
    "cli/main.py": {"batches", "bench", "cluster", "models"},
    "llm/launchers.py": {"cluster"},
    "workers/kv_ports.py": {"nixl"},
}
"""The only files outside `extras` that import optional parts, and the parts. A server, a command or a worker
is composed in these files."""

PURE_LIBRARIES = set(sys.stdlib_module_names) | {"numpy", "msgspec", "streamserve"}


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(parse(file)))


def imports(file: Path) -> set[str]:
    """Return the dotted names of the modules that a file imports anywhere."""
    modules: set[str] = set()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: imports are absolute"
            modules.add(node.module or "")
    return modules


def imported_names(file: Path) -> set[str]:
    """Return the modules that a file imports, and the names that it imports from modules, which may be
    modules too."""
    froms = [node for node in nodes(file) if isinstance(node, ast.ImportFrom)]
    return imports(file) | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def files(package: str) -> list[Path]:
    paths = sorted((SOURCE / package.replace(".", "/")).rglob("*.py"))
    assert paths, f"there is no package {package}"
    return paths


def test_every_package_has_a_rule() -> None:
    packages = {folder.name for folder in SOURCE.iterdir() if list(folder.glob("*.py"))}
    optional = {f"extras.{part.name}" for part in (SOURCE / "extras").iterdir() if list(part.glob("*.py"))}
    assert packages - {"extras"} | optional == set(ALLOWED)


def test_rules_name_whole_packages_and_have_no_circle() -> None:
    assert set().union(*ALLOWED.values()) <= set(ALLOWED)
    TopologicalSorter(ALLOWED).prepare()  # raises CycleError


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_their_rule_allows(package: str) -> None:
    for file in files(package):
        optional = COMPOSITION_ROOTS.get(str(file.relative_to(SOURCE)), set())
        allowed = ALLOWED[package] | {package} | {f"extras.{part}" for part in optional}
        for module in imports(file):
            if module.startswith("streamserve."):
                inside = module.removeprefix("streamserve.")
                assert any(inside == name or inside.startswith(name + ".") for name in allowed), (
                    f"{file.relative_to(SOURCE)} imports {module}"
                )


def test_only_composition_roots_import_optional_parts() -> None:
    """A part in `extras` can be deleted together with its line in a composition root."""
    roots: dict[str, set[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        path = str(file.relative_to(SOURCE))
        names = {
            name.split(".")[2] for name in imported_names(file) if name.startswith("streamserve.extras.")
        }
        if names and not path.startswith("extras/"):
            roots[path] = names
    assert roots == COMPOSITION_ROOTS


def test_no_rule_names_an_optional_part() -> None:
    assert not {name for allowed in ALLOWED.values() for name in allowed if name.startswith("extras")}


def parts(package: str) -> dict[str, set[str]]:
    """Return the folders and files of a package, and for each the others that it imports: anywhere, also in
    functions and for type checking."""
    names = {entry.stem for entry in (SOURCE / package).iterdir() if entry.suffix == ".py" or entry.is_dir()}
    imported: dict[str, set[str]] = {name: set() for name in names}
    prefix = f"streamserve.{package}."
    for file in files(package):
        own = file.relative_to(SOURCE / package).with_suffix("").parts[0]
        inside = {name.removeprefix(prefix) for name in imported_names(file) if name.startswith(prefix)}
        imported[own] |= {name.partition(".")[0] for name in inside} & names - {own}
    return imported


def circle(imported: dict[str, set[str]]) -> list[str]:
    """Return a path of imports from a module back to that module; empty if there is none."""
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.parametrize("package", ["api", "cli"])
def test_no_circles_within_a_package(package: str) -> None:
    assert circle(parts(package)) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """No files import each other in a circle. `streamserve/__init__.py` is left out: it imports LLM when that
    is first used."""
    modules = {}
    for file in sorted(SOURCE.rglob("*.py")):
        module = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        modules[module] = file
    del modules["streamserve"]
    imported = {module: imported_names(file) & modules.keys() - {module} for module, file in modules.items()}
    assert circle(imported) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_the_transport_of_the_api_imports_nothing_above_it() -> None:
    assert parts("api")["http"] == set()
    assert "http" in parts("api")["routes"]


@pytest.mark.parametrize(
    "package",
    [
        "protocol",
        "contracts",
        "system",
        "baselines",
        "scheduling",
        "speculation",
        "engine",
        "draft_service",
        "fleet",
        "api",
        "simulate",
        "text",
        "gguf",
        "hub",
        "llm",
        "settings",
        "extras.anthropic",
        "extras.batches",
        "extras.bench",
        "extras.cluster",
        "extras.models",
        "extras.ollama",
        "extras.pooling",
        "extras.responses",
        "extras.web_page",
    ],
)
def test_packages_without_torch(package: str) -> None:
    lazily = {"text/tokenizer.py": {"transformers"}}  # used for folders without a tokenizer.json
    for file in files(package):
        heavy = {module.partition(".")[0] for module in imports(file)} & {"torch", "transformers"}
        assert heavy <= lazily.get(str(file.relative_to(SOURCE)), set())


def test_the_client_stands_alone() -> None:
    """The package of the client imports nothing of the server, which has it only as `streamserve.client`."""
    modules = set().union(*map(imports, sorted((SOURCE.parent / "streamserve_client").rglob("*.py"))))
    assert {name.partition(".")[0] for name in modules} - sys.stdlib_module_names == {"httpx"}
    users = {file.name for file in SOURCE.rglob("*.py") if "streamserve_client" in imports(file)}
    assert users == {"client.py"}


def test_a_client_process_never_loads_torch() -> None:
    code = "import sys, streamserve.llm.llm, streamserve.cli.run_server; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_command_line_is_quick_to_import() -> None:
    heavy = {
        "torch",
        "transformers",
        "numpy",
        "fastapi",
        "starlette",
        "pydantic",
        "uvicorn",
        "zmq",
        "aiohttp",
    }
    code = "import sys, streamserve.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize("package", ["baselines", "contracts", "scheduling", "speculation"])
def test_decisions_are_pure(package: str) -> None:
    for file in files(package):
        for module in imports(file):
            assert module.partition(".")[0] in PURE_LIBRARIES
            assert module not in {"time", "random", "os", "socket", "asyncio"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    for file in sorted(SOURCE.rglob("*.py")):
        assert not {m.partition(".")[0] for m in imports(file)} & {
            "pickle",
            "dill",
            "cloudpickle",
            "marshal",
            "shelve",
        }
        calls = {
            node.func.id
            for node in nodes(file)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"eval", "exec", "compile"}, file


NAMES_A_TEST = re.compile(r"^\s*(from|import) tests\b.*(\btest_|\($)", re.MULTILINE)


def test_test_files_import_no_other_test_file() -> None:
    """Test files import no other test file. Shared code is in conftest.py or in helper modules."""
    files = sorted(TESTS.rglob("*.py"))
    names = {".".join(file.relative_to(TESTS.parent).with_suffix("").parts) for file in files}
    test_files = {name for name in names if name.rpartition(".")[2].startswith("test_")}
    assert f"tests.{Path(__file__).stem}" in test_files
    for file in files:
        if NAMES_A_TEST.search(file.read_text(encoding="utf-8")):  # Building all trees takes seconds.
            assert not imported_names(file) & test_files, file.relative_to(TESTS)


def test_imports_of_test_files_are_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("import tests.test_a\nfrom tests import test_b\nfrom tests.api.test_c import name\n")
    assert {"tests.test_a", "tests.test_b", "tests.api.test_c"} <= imported_names(file)


def test_no_two_classes_have_the_same_name() -> None:
    """No two classes have the same name, so a reader who searches for a class finds only one."""
    places: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_load_client_can_be_used_alone() -> None:
    """The load client can be used alone: only its command imports other packages, so a measurement shares no
    code with the measured server."""
    for file in files("extras.bench"):
        if file.stem != "cli":
            own = {name for name in imports(file) if name.startswith("streamserve.")}
            assert all(f"{name}.".startswith("streamserve.extras.bench.") for name in own), file
