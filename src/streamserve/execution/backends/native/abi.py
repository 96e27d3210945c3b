"""Check that the structures and enums of a loaded library match Python's.

ctypes does not know the library's headers: after a change of one side, the kernels would read a field from
the bytes of another one. The library therefore describes its structures (cpp/abi.cpp), and a library that
differs is refused.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamserve.protocol.errors import CheckpointError

SIZE = "size"
"""The entry of a structure that has its size."""

Table = dict[str, dict[str, str]]
"""The layout that Python and the library must agree about. By structure or enum, then by field or value: the
field's place, or the value's number."""


class LibraryMismatch(CheckpointError):
    """The kernels do not match the Python files that call them. The message names the first difference."""


def check(
    library: ctypes.CDLL,
    path: Path,
    functions: Sequence[str],
    structures: Mapping[str, type[ctypes.Structure]],
    values: Mapping[str, Mapping[str, int]],
) -> None:
    """Raise LibraryMismatch unless the library at `path` has these functions, structures and enums."""
    absent = next((name for name in ("ss_abi", *functions) if not hasattr(library, name)), None)
    if absent:
        raise LibraryMismatch(_message(path, f"there is no function {absent}"))
    library.ss_abi.restype = ctypes.c_char_p
    mismatch = difference(own_table(structures, values), library_table(library.ss_abi().decode()))
    if mismatch:
        raise LibraryMismatch(_message(path, mismatch))


def _message(path: Path, reason: str) -> str:
    return (
        f"the kernels {path} do not fit to the Python files: {reason}. Install streamserve again; after a "
        "change of execution/backends/native, change the structures of both sides (structures.py, cpp/)"
    )


def own_table(
    structures: Mapping[str, type[ctypes.Structure]], values: Mapping[str, Mapping[str, int]]
) -> Table:
    """Return the table of Python's structures and enums."""
    table = {name: _entries(structure) for name, structure in structures.items()}
    return table | {
        name: {entry: str(int(value)) for entry, value in numbers.items()} for name, numbers in values.items()
    }


def _entries(structure: type[ctypes.Structure]) -> dict[str, str]:
    fields = {str(name): getattr(structure, str(name)) for name, *_ in structure._fields_}
    entries = {name: f"{field.size} bytes at {field.offset}" for name, field in fields.items()}
    return entries | {SIZE: f"{ctypes.sizeof(structure)} bytes"}


def library_table(text: str) -> Table:
    """Return the table that the library's description holds: in each line, separated by tabs, a structure, a
    field, and where the field is; or an enum, a value, and its number."""
    table: Table = {}
    for line in text.splitlines():
        name, entry, value = line.split("\t")
        table.setdefault(name, {})[entry] = value
    return table


def difference(own: Table, library: Table) -> str:
    """Return the first difference between Python's table and the library's; empty if there is none."""
    for name in dict.fromkeys((*own, *library)):
        if name not in own or name not in library:
            return f"only {'Python' if name in own else 'the library'} has {name}"
        for entry in dict.fromkeys((*own[name], *library[name])):
            ours, theirs = own[name].get(entry, "absent"), library[name].get(entry, "absent")
            if ours != theirs:
                return f"{name}.{entry} is {ours} in Python, and {theirs} in the library"
    return ""
