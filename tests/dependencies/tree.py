"""The files of the repository and what each depends on directly; closures and their hashes.

Reading all files takes seconds. A cache in build/ stores the references of each file by size and modification
time; with it, reading takes a fraction of a second.
"""

import hashlib
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

import msgspec

from tests.dependencies.references import COMMAND, References, references

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "dependencies.json"
FOLDERS = (
    "src", "client", "tests", "benchmarks", "examples", "scripts", "packaged_model", "docs", "deploy", "dist",
    ".ci",
)  # fmt: skip
"""Folders that are read, in addition to the files at the top. `dist` has the wheel that tests install."""
ROOTS = ("src/", "", "packaged_model/")
"""Folders in which imports are looked up. The trainer of the packaged model is run from its folder."""
RESULTS = ("tests/results", "benchmarks/results", "tests/durations.json")
"""Files that runs write. Results do not depend on each other: only tests of pages read them."""
RENDERER = "benchmarks/figures"
SHOWS_RESULTS = (RENDERER, "tests/docs")
"""Programs that render results, and tests of the pages. Programs that write results start them, but do not
depend on them."""
READS_EVERYTHING = ("tests/docs", "tests/test_language.py", "tests/dependencies/test_tree.py")
"""Tests whose files name any file of the repository, or read all of them."""
NAMES_ONLY = (
    "src", "tests/dependencies/tree.py", "tests/dependencies/test_references.py", "tests/selection.py"
)  # fmt: skip
"""Code whose strings name files of the repository without reading them."""
EVERYWHERE = "pyproject.toml"
"""Files that everything depends on: dependencies and settings of the tools."""
RENDERED = re.compile(
    rb"(<!-- figures: \S+ -->\n).*?(?=<!-- end -->)|(<!--=[\w.-]+-->).*?(?=<!--/-->)", re.DOTALL
)


class Source(msgspec.Struct, frozen=True):
    """A file as it was read. `stamp` has its modification time in nanoseconds and its size in bytes."""

    stamp: tuple[int, int]
    digest: str
    references: References | None


class _Cache(msgspec.Struct):
    rules: str
    files: dict[str, Source]


@dataclass
class Tree:
    """All files, by their path from `root`, and the direct dependencies of each.

    `near`: imports, and data next to the code. `far`: what a file can reach without importing it, such as
    programs, whole folders and pyproject.toml. Tests notice a change sooner through the former.
    """

    root: Path
    files: dict[str, Source]
    near: dict[str, frozenset[str]] = field(default_factory=dict)
    far: dict[str, frozenset[str]] = field(default_factory=dict)

    def closure(self, paths: Iterable[str]) -> list[str]:
        """Return the files that these files, or the files in these folders, can reach, including
        themselves."""
        reached = 0
        for path in paths:
            for name in self.below(path):
                reached |= self._reach[name]
        return [name for number, name in enumerate(self._names) if reached >> number & 1]

    def content(self, paths: Iterable[str]) -> str:
        """Return a hash of the paths and bytes of the closure. Rendered numbers in pages do not count."""
        return digest_of(f"{name}\0{self.files[name].digest}\n" for name in self.closure(paths))

    def distances(self, changed: Collection[str]) -> dict[str, int]:
        """Return the number of imports from a file to the nearest changed file, for files that have such a
        path."""
        users: dict[str, list[str]] = {}
        for name, used in self.near.items():
            for other in used:
                users.setdefault(other, []).append(name)
        found = {name: 0 for name in changed if name in self.files}
        queue = deque(found)
        while queue:
            name = queue.popleft()
            for user in users.get(name, ()):
                if user not in found:
                    found[user] = found[name] + 1
                    queue.append(user)
        return found

    def below(self, path: str) -> list[str]:
        """Return the file, or the files in the folder. Raises KeyError if there is neither."""
        if path in self.files:
            return [path]
        found = [name for name in self.files if is_in(name, path)]
        if not found:
            raise KeyError(f"no such file or folder: {path}")
        return found

    def tests(self) -> list[str]:
        """Return the files with tests."""
        return [name for name in self.files if name.startswith("tests/") and is_test(name)]

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self.files)

    @cached_property
    def _reach(self) -> dict[str, int]:
        """Return the closure of each file as a set of bits; bit i stands for the i-th of the sorted names."""
        numbers = {name: number for number, name in enumerate(self._names)}
        direct = {name: self.near[name] | self.far[name] for name in self._names}
        reach = {name: 1 << number for name, number in numbers.items()}
        changed = True
        while changed:
            changed = False
            for name, used in direct.items():
                bits = reach[name]
                for other in used:
                    bits |= reach[other]
                if bits != reach[name]:
                    reach[name], changed = bits, True
        return reach


def content(*paths: str) -> str:
    """Return the hash of the content that these files and folders depend on, in the current working tree."""
    return read().content(paths)


def read(root: Path = ROOT, cache: Path | None = CACHE) -> Tree:
    """Read the repository. With `cache`, only files that have changed since the last reading are read."""
    rules = digest_of(
        file.read_text() for file in (Path(__file__), Path(__file__).with_name("references.py"))
    )
    stored = _stored(cache, rules)
    files: dict[str, Source] = {}
    for name, stamp in sorted(_listed(root)):
        known = stored.get(name)
        files[name] = known if known and known.stamp == stamp else _read(root, name, stamp, known)
    if cache and files != stored:
        _write(cache, _Cache(rules, files))
    tree = Tree(root, files)
    _connect(tree)
    return tree


def is_in(name: str, folders: str | Iterable[str]) -> bool:
    """Return whether a path is one of these paths, or inside one of them."""
    folders = (folders,) if isinstance(folders, str) else folders
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def is_test(name: str) -> bool:
    """Return whether pytest collects the file."""
    return name.rpartition("/")[2].startswith("test_") and name.endswith(".py")


def digest_of(texts: Iterable[str]) -> str:
    """Return the BLAKE2b hash of these texts, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def _listed(root: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the files with their stamps, without files that tools and Python write."""
    for name in sorted(os.listdir(root)):
        if (root / name).is_file() and (not name.startswith(".") or name.endswith("ignore")):
            yield name, _stamp(os.stat(root / name))
    pending = [folder for folder in FOLDERS if (root / folder).is_dir()]
    while pending:
        folder = pending.pop()
        for entry in os.scandir(root / folder):
            if entry.name.startswith((".", "__pycache__")) or entry.name.endswith((".egg-info", ".pyc")):
                continue
            if entry.is_dir():
                pending.append(f"{folder}/{entry.name}")
            elif entry.is_file():
                yield f"{folder}/{entry.name}", _stamp(entry.stat())


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _read(root: Path, name: str, stamp: tuple[int, int], known: Source | None) -> Source:
    data = (root / name).read_bytes()
    if name.endswith(".md"):
        data = RENDERED.sub(rb"\1\2", data)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    if known and known.digest == digest:
        return Source(stamp, digest, known.references)
    if not name.endswith(".py"):
        return Source(stamp, digest, None)
    module = _module_name(name)
    is_package = name.endswith("/__init__.py")
    package = module if is_package else module.rpartition(".")[0]
    try:
        return Source(stamp, digest, references(data.decode(), package, is_package))
    except SyntaxError:  # incomplete, or invalid on purpose; the file's own test reports it
        return Source(stamp, digest, References())


def _module_name(name: str) -> str:
    parts = list(PurePosixPath(name).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _stored(cache: Path | None, rules: str) -> dict[str, Source]:
    """Return the content of the cache; an empty one if it cannot be read or was written by other rules."""
    try:
        stored = msgspec.json.decode(cache.read_bytes(), type=_Cache) if cache else None
    except (OSError, msgspec.DecodeError):
        return {}
    return stored.files if stored and stored.rules == rules else {}


def _write(cache: Path, content: _Cache) -> None:
    """Replace the cache atomically, because other processes may read it."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.encode(content))
    part.replace(cache)


def _connect(tree: Tree) -> None:
    """Find the direct dependencies of each file."""
    index = _Index(tree.files)
    for name, source in tree.files.items():
        if source.references is None:
            tree.near[name] = tree.far[name] = frozenset()
            continue
        near = index.modules(source.references) | index.packages(name) | index.adjacent(name)
        far = index.programs(source.references) | index.paths(name, source.references)
        everything = is_in(name, READS_EVERYTHING)
        if everything:
            far |= tree.files.keys()
        if not (everything and is_in(name, SHOWS_RESULTS)):
            unseen = index.results if is_in(name, SHOWS_RESULTS) else index.unseen
            if is_test(name):  # it may be one of the renderer
                unseen = {other for other in unseen if not is_in(other, RENDERER)}
            near, far = near - unseen, far - unseen
        tree.near[name], tree.far[name] = frozenset(near), frozenset(far)


class _Index:
    """Looks up what references mean among the files that exist."""

    def __init__(self, files: dict[str, Source]) -> None:
        self._files = files
        self._inside: dict[str, set[str]] = {}
        for name in files:
            for folder in _folders(name):
                self._inside.setdefault(folder, set()).add(name)
        self._with_python = {
            folder for folder, inside in self._inside.items() if any(name.endswith(".py") for name in inside)
        }
        self._adjacent: dict[str, set[str]] = {}
        self._modules: dict[str, set[str]] = {}
        self.results = {name for name in files if is_in(name, RESULTS)}
        self.unseen = self.results | {name for name in files if is_in(name, SHOWS_RESULTS)}

    def modules(self, found: References) -> set[str]:
        """Return the files of the imported modules, and of the packages that contain them."""
        files: set[str] = set()
        for name in found.modules:
            if name not in self._modules:
                self._modules[name] = self._module(*name.partition(":")[::2])
            files |= self._modules[name]
        return files

    def _module(self, module: str, member: str = "") -> set[str]:
        """Return the files of a module, or of the module that an imported name belongs to."""
        if member and (file := self._file(f"{module}.{member}")):
            return {file, *self.packages(file)}
        names = module.split(".")
        for length in range(len(names), 0, -1):  # the module, if a class and its attribute follow
            if file := self._file(".".join(names[:length])):
                return {
                    file,
                    *self.packages(file),
                    *self._exported(file, member or "".join(names[length:][:1])),
                }
        return set()

    def _exported(self, file: str, member: str) -> set[str]:
        """Return the files that define a name which a package imports on demand; of all such names if none is
        given."""
        source = self._files[file].references
        exports = source.exports if source else {}
        named = (
            list(exports.values()) if member in ("", "*") else [exports[member]] if member in exports else []
        )
        return {other for name in named for other in self._module(*name.partition(":")[::2])}

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        for root in ROOTS:
            for name in (f"{root}{path}.py", f"{root}{path}/__init__.py"):
                if name in self._files:
                    return name
        return None

    def packages(self, name: str) -> set[str]:
        """Return the files that Python and pytest import before the file: its packages, and `conftest.py`."""
        before = {f"{folder}/__init__.py" for folder in _folders(name)}
        if is_test(name) or name.endswith("/conftest.py"):
            before |= {f"{folder}/conftest.py" for folder in _folders(name)}
        return (before & self._files.keys()) - {name}

    def adjacent(self, name: str) -> set[str]:
        """Return the data next to a file: other files in its folder, and in folders without Python there."""
        folder = name.rpartition("/")[0]
        if folder not in self._adjacent:
            self._adjacent[folder] = {
                other
                for other in self._inside[folder]
                if not other.endswith(".py")
                and not any(
                    between in self._with_python for between in _folders(other) if len(between) > len(folder)
                )
            }
        return self._adjacent[folder]

    def programs(self, found: References) -> set[str]:
        """Return the files of the programs that are started, pyproject.toml included."""
        files = {EVERYWHERE} & self._files.keys()
        for name in found.programs:
            if name == COMMAND:
                files |= {file for file in self._files if file.startswith("src/")}
            else:
                files |= self._module(name) | self._module(name, "__main__")
        return files

    def paths(self, name: str, found: References) -> set[str]:
        """Return the files and folders that a file names by a path relative to its folder or to a folder
        above it.

        A file that imports modules by computed names depends on its whole folder.
        """
        above = [*_folders(name), ""]
        files = set(self._inside[above[0]]) if found.dynamic else set()
        if is_in(name, NAMES_ONLY):
            return files
        for path in found.paths:
            for folder in above:
                candidate = os.path.normpath(f"{folder}/{path}").lstrip("/")
                files |= {candidate} & self._files.keys() or self._inside.get(candidate, set())
        return files


def _folders(name: str) -> list[str]:
    """Return the folders that contain a file, innermost first, without the repository's top folder."""
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
