"""Check that the structures, enums and functions of a loaded library match Python's.

ctypes does not know the library's headers: after a change of one side, the kernels would read a field from
the bytes of another one, or take an argument from another register. The library therefore describes what
Python uses of it (cpp/abi.cpp), and a library that differs is refused.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamserve.protocol.errors import CheckpointError

_NUMBERS = {
    ctypes.c_int: "int32", ctypes.c_uint64: "uint64", ctypes.c_size_t: "uint64", ctypes.c_float: "float32",
    ctypes.c_double: "float64",
}  # fmt: skip
"""The names in cpp/abi.h of the types of numbers that Python passes and receives."""

SIZE = "size"
"""The entry of a structure that has its size."""

Table = dict[str, dict[str, str]]
"""What Python and the library must agree about. By structure or enum, then by field or value: the field's
place, or the value's number. Under "functions", by function: the types of its result and arguments."""

Signatures = Mapping[str, tuple[Any, Sequence[Any]]]
"""The ctypes type of a function's result (None for void) and those of its arguments, by function."""


class LibraryMismatch(CheckpointError):
    """The kernels do not match the Python files that call them. The message names the first difference."""


def check(
    library: ctypes.CDLL,
    path: Path,
    functions: Signatures,
    structures: Mapping[str, type[ctypes.Structure]],
    values: Mapping[str, Mapping[str, int]],
) -> None:
    """Raise LibraryMismatch unless the library at `path` has these functions, structures and enums."""
    if not hasattr(library, "ss_abi"):
        raise LibraryMismatch(_message(path, "there is no function ss_abi"))
    library.ss_abi.restype = ctypes.c_char_p
    own = own_table(structures, values, functions)
    mismatch = difference(own, library_table(library.ss_abi().decode()))
    if mismatch:
        raise LibraryMismatch(_message(path, mismatch))


def _message(path: Path, reason: str) -> str:
    return (
        f"the kernels {path} do not fit to the Python files: {reason}. Install streamserve again; after a "
        "change of execution/backends/native, change both sides (structures.py, library.py; cpp/)"
    )


def own_table(
    structures: Mapping[str, type[ctypes.Structure]],
    values: Mapping[str, Mapping[str, int]],
    functions: Signatures,
) -> Table:
    """Return the table of Python's structures, enums and functions."""
    table = {name: _entries(structure) for name, structure in structures.items()}
    table |= {
        name: {entry: str(int(value)) for entry, value in numbers.items()} for name, numbers in values.items()
    }
    return table | {"functions": {name: _types(*signature) for name, signature in functions.items()}}


def _types(result: Any, arguments: Sequence[Any]) -> str:
    return f"{_type(result)} ({', '.join(map(_type, arguments))})"


def _type(kind: Any) -> str:
    """Return a ctypes type in the words of cpp/abi.h. All types but numbers are pointers."""
    return "void" if kind is None else _NUMBERS.get(kind, "pointer")


def _entries(structure: type[ctypes.Structure]) -> dict[str, str]:
    fields = {str(name): getattr(structure, str(name)) for name, *_ in structure._fields_}
    entries = {name: f"{field.size} bytes at {field.offset}" for name, field in fields.items()}
    return entries | {SIZE: f"{ctypes.sizeof(structure)} bytes"}


def library_table(text: str) -> Table:
    """Return the table that the library's description holds. Each line has three parts, separated by tabs: a
    structure, a field and its place; an enum, a value and its number; or "functions", a function and its
    types."""
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
