"""A library is refused if its structures, enums or functions differ from those declared in Python."""

import ctypes
import re
from ctypes import c_float, c_int, c_int32, c_size_t, c_uint64, c_void_p
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest

from streamserve.cli.findings import Verdict
from streamserve.cli.kernel_findings import _library_finding
from streamserve.execution.backends.native import abi, library
from streamserve.execution.backends.native.abi import LibraryMismatch
from streamserve.execution.backends.native.structures import DrawStruct, SpanStruct, packer


@pytest.fixture
def path() -> FilePath:
    loaded = library.kernels()
    if loaded is None:
        pytest.skip("there is no compiler")
    return FilePath(loaded._name)


def span_with(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(
        "Span", (ctypes.Structure,), {"_fields_": (("blocks", c_void_p), ("parents", c_void_p), *fields)}
    )


NUMBERS = tuple((name, c_int32) for name in ("row", "rows", "start", "linear"))
SWAPPED = tuple((name, c_int32) for name in ("row", "start", "rows", "linear"))
CHANGES = {
    "swapped": (SWAPPED, "Span.start is 4 bytes at 20 in Python, and 4 bytes at 24 in the library"),
    "absent": (NUMBERS[:-1], "Span.linear is absent in Python, and 4 bytes at 28 in the library"),
    "wider": (
        (*NUMBERS[:-1], ("linear", c_void_p)),
        "Span.linear is 8 bytes at 32 in Python, and 4 bytes at 28 in the library",
    ),
    "further": (
        (*NUMBERS, ("tail", c_int32)),
        "Span.tail is 4 bytes at 32 in Python, and absent in the library",
    ),
}


@pytest.mark.parametrize(("fields", "message"), CHANGES.values(), ids=CHANGES)
def test_a_structure_changed_in_python_alone_refuses_the_library(path, monkeypatch, fields, message):
    monkeypatch.setitem(library._STRUCTURES, "Span", span_with(*fields))
    with pytest.raises(LibraryMismatch, match=re.escape(message)) as refused:
        library.load_library(path)
    assert "Install streamserve again" in str(refused.value)
    monkeypatch.undo()
    library.load_library(path)


def test_an_enum_changed_in_python_alone_refuses_the_library(path, monkeypatch):
    monkeypatch.setitem(library._VALUES, "Path", {**library._VALUES["Path"], "AMX": 5})
    with pytest.raises(LibraryMismatch, match=r"Path\.AMX is 5 in Python, and 4 in the library"):
        library.load_library(path)


def test_the_doctor_says_that_such_kernels_fail(path, monkeypatch):
    monkeypatch.setitem(library._STRUCTURES, "Span", span_with(*SWAPPED))
    finding = _library_finding(path, "compiled on this machine")
    assert finding.verdict is Verdict.FAIL
    assert "Span.start" in finding.text


def test_every_structure_of_the_module_is_compared():
    from streamserve.execution.backends.native import structures

    declared = {
        value
        for value in vars(structures).values()
        if isinstance(value, type) and issubclass(value, ctypes.Structure)
    }
    assert declared == set(library._STRUCTURES.values())


@pytest.mark.parametrize(
    ("result", "arguments", "message"),
    [
        (c_int, [c_int], "int32 (int32) in Python, and int32 (int32, int32) in the library"),
        (c_uint64, [c_int, c_int], "uint64 (int32, int32) in Python"),
        (c_int, [c_float, c_int], "int32 (float32, int32) in Python"),
        (c_int, [c_int, c_void_p], "int32 (int32, pointer) in Python"),
        (None, [c_int, c_size_t], "void (int32, uint64) in Python"),
    ],
)
def test_a_function_changed_in_python_alone_refuses_the_library(
    path, monkeypatch, result, arguments, message
):
    monkeypatch.setitem(library._SIGNATURES, "ss_path_supported", (result, arguments))
    with pytest.raises(LibraryMismatch, match=re.escape(f"functions.ss_path_supported is {message}")):
        library.load_library(path)


def test_every_function_of_the_library_has_a_signature(path):
    exported = abi.library_table(library.kernels().ss_abi().decode())["functions"]
    assert exported.keys() == library._SIGNATURES.keys()
    source = FilePath(library.__file__).with_name("cpp").joinpath("api.cpp").read_text()
    assert set(re.findall(r"\b(ss_\w+)\([^)]*\)\s*noexcept", source)) == set(exported)


def test_a_library_without_a_function_is_refused():
    with pytest.raises(LibraryMismatch, match="there is no function ss_abi"):
        abi.check(SimpleNamespace(), FilePath("k.so"), {}, {}, {})
    own = abi.own_table({}, {}, {"ss_rows": (None, [c_void_p])})
    assert abi.difference(own, {"functions": {}}) == (
        "functions.ss_rows is void (pointer) in Python, and absent in the library"
    )


def test_equal_descriptions_have_no_difference():
    own = abi.own_table({"Span": SpanStruct}, {"Path": {"AVX2": library.Path.AVX2}}, library._SIGNATURES)
    lines = [
        f"{name}\t{entry}\t{value}\n" for name, entries in own.items() for entry, value in entries.items()
    ]
    assert abi.difference(own, abi.library_table("".join(lines))) == ""
    assert own["Span"]["start"] == "4 bytes at 24"
    assert own["Path"] == {"AVX2": "1"}
    assert own["functions"]["ss_pool_delete"] == "void (pointer)"


def test_a_structure_that_only_one_side_has_is_named():
    own = abi.own_table({"Span": SpanStruct}, {}, {})
    assert abi.difference(own, {"functions": {}}) == "only Python has Span"
    assert abi.difference({"functions": {}}, own) == "only the library has Span"


@pytest.mark.parametrize("structure", [SpanStruct, DrawStruct])
def test_packed_fields_lie_as_in_the_structure(structure):
    numbers = range(1, len(structure._fields_) + 1)
    packed = structure.from_buffer_copy(packer(structure).pack(*numbers))
    assert [getattr(packed, name) for name, _ in structure._fields_] == [*numbers]
