"""What the text of a Python file refers to: modules, programs, and files by their path.

Nothing is imported. Imports inside functions and for type checkers count too, and so do names of modules in
strings: `"streamserve.workers"` after `-m`, `monkeypatch.setattr("streamserve.x.y")`, code of processes.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from tests.sources import parse

PACKAGES = "streamserve|tests|benchmarks|scripts|packaged_model|examples"
DOTTED = re.compile(rf"(?:{PACKAGES})(?:\.\w+)+")
IMPORTED = re.compile(rf"\bfrom\s+((?:{PACKAGES})[\w.]*)\s+import\s+\(?([\w,\s]+)")
STARTED = re.compile(r"-m ((?:streamserve|tests|benchmarks)[\w.]*)")
FILE = re.compile(r"[\w-][\w.-]*(?:/[\w.-]+)+|[\w-][\w.-]*\.\w+")
MAX_PATH = 120
COMMAND = "streamserve"
"""The command of the package, installed and after `-m`. It can reach the whole package."""
DYNAMIC = ("import_module", "__import__", "iter_modules")


class References(msgspec.Struct, frozen=True):
    """The references of a file.

    `modules`: dotted names; `package:name` is a name that is imported from a package or module.
    `programs`: modules that are started as programs. `paths`: relative paths that may exist.
    `exports`: of a package, the names that it imports when they are asked for, with their modules.
    `dynamic`: whether it imports modules by computed names.
    """

    modules: list[str] = []
    programs: list[str] = []
    paths: list[str] = []
    exports: dict[str, str] = {}
    dynamic: bool = False


def references(text: str, package: str, is_package: bool) -> References:
    """Return what a file refers to.

    Args:
        text: its content.
        package: the dotted name of the package that it is in, for relative imports.
        is_package: it is an `__init__.py`: names that its functions import count as exported on demand.
    """
    tree = parse(text)
    modules, programs, paths, exports, dynamic = set[str](), set[str](), set[str](), dict[str, str](), False
    deferred = {id(node) for node in _deferred(tree)} if is_package else set()
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(node.left) for node in ast.walk(tree) if isinstance(node, ast.BinOp)}
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom() if id(node) in deferred:
                exports |= _exports(node, package)
            case ast.Import():
                modules |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                modules |= {f"{_source(node, package)}:{alias.name}" for alias in node.names}
            case ast.List() | ast.Tuple():
                programs |= _programs(node.elts)
            case ast.Call():
                programs |= _programs(node.args)
                dynamic |= _dynamic(node)
            case ast.BinOp(op=ast.Div()) if id(node) not in inner:
                paths |= set(_chains(node))
            case ast.Constant(value=str(value)) if id(node) not in prose:
                modules |= _named_in(value)
                programs |= set(STARTED.findall(value))
                paths |= {value} if len(value) < MAX_PATH and FILE.fullmatch(value) else set()
    if package.partition(".")[0] == COMMAND:  # messages name the command, and the file starts single modules
        programs.discard(COMMAND)
    return References(sorted(modules), sorted(programs), sorted(paths), exports, dynamic)


def _deferred(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the imports in functions and in `if TYPE_CHECKING`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            yield from ast.walk(node)


def _exports(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, str]:
    source = f"{_source(node, package)}:" if isinstance(node, ast.ImportFrom) else ""
    return {alias.asname or alias.name: source + alias.name for alias in node.names}


def _source(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that an import statement imports from."""
    if not node.level:
        return node.module or ""
    above = package.split(".")
    return ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])


def _programs(elements: list[ast.expr]) -> set[str]:
    """Return the literals that follow `-m` in a command, and the command of the package itself."""
    values = [_last_literal(element) for element in elements]
    return {name for flag, name in pairwise(values) if flag == "-m" and name} | ({COMMAND} & set(values))


def _last_literal(element: ast.expr) -> str:
    """Return a literal's text, or the end of a path: `BIN / "streamserve"`."""
    if isinstance(element, ast.Call) and element.args:  # str(path)
        return _last_literal(element.args[0])
    last = element.right if isinstance(element, ast.BinOp) else element
    return last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""


def _dynamic(node: ast.Call) -> bool:
    """Return whether a call imports by a computed name; literal names are found as strings."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in DYNAMIC and not (node.args and isinstance(node.args[0], ast.Constant))


def _named_in(text: str) -> set[str]:
    """Return the modules that a string names, or that code in the string imports."""
    found = set(DOTTED.findall(text))
    for source, names in IMPORTED.findall(text):
        found |= {f"{source}:{name}" for name in re.findall(r"\w+", names)}
    return found | set(re.findall(rf"\bimport\s+((?:{PACKAGES})[\w.]*)", text))


def _chains(node: ast.expr) -> Iterator[str]:
    """Yield the runs of literals in `folder / "docs" / "operations" / name`."""
    parts: list[str | None] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        literal = isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)
        parts.append(node.right.value if literal else None)  # type: ignore[attr-defined]
        node = node.left
    run: list[str] = []
    for part in [*reversed(parts), None]:
        if part is not None:
            run.append(part)
        elif run:
            yield "/".join(run)
            run = []
