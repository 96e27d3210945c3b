"""Headers of safetensors files that contradict themselves or the file are refused before any tensor is
read."""

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.tensor_header import LFS_POINTER, StoredTensor, read_tensor_header

TENSORS = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int8), "c": np.zeros((0, 5), np.float16)}
VALUES: list[Any] = [
    0, 1, -1, 2, 3, 4, 6, 24, 28, 2**31, 2**62, 2**64, 10**30, 1.5, "F32", "I8", "F16", "X", None, True, [],
    [1], [0, 24], [24, 28], [24, 0], [-8, 16], [0, 2**62], [2**62], [2**31, 2**31], [0, 2**62], {}, [1] * 9,
]  # fmt: skip


def write(path: Path, header: Any, data: bytes = bytes(28)) -> Path:
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


def good() -> dict[str, Any]:
    return {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I8", "shape": [4], "data_offsets": [24, 28]},
        "__metadata__": {"format": "pt"},
    }


def changed(name: str, field: str, value: Any) -> dict[str, Any]:
    header = good()
    header[name][field] = value
    return header


def test_the_tensors_of_a_file_are_those_that_were_written(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file")
    tensors = read_tensor_header(tmp_path / "file")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: array.shape for name, array in TENSORS.items()
    }
    assert read_tensor_header(write(tmp_path / "other", good()))["b"] == StoredTensor("I8", (4,), 24, 28)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (changed("a", "shape", [2**62]), "tensor a: shape [4611686018427387904] has more than"),
        (changed("a", "shape", [2**31, 2**31]), "tensor a: shape [2147483648, 2147483648] has more than"),
        (changed("a", "shape", [-1, -6]), "tensor a: shape must be a list of up to 8 sizes, not [-1, -6]"),
        (changed("a", "shape", [6.0]), "tensor a: shape must be a list of up to 8 sizes, not [6.0]"),
        (changed("a", "shape", [1] * 100_000), "tensor a: shape must be a list of up to 8 sizes, not [1, 1,"),
        (changed("a", "shape", [7]), "tensor a: data_offsets [0, 24] do not hold F32 of shape [7]"),
        (changed("a", "dtype", "F64"), "tensor a: data_offsets [0, 24] do not hold F64 of shape [2, 3]"),
        (changed("a", "dtype", None), "tensor a: dtype None is unknown"),
        (changed("a", "data_offsets", [-8, 16]), "tensor a: data_offsets must be two positions"),
        (changed("a", "data_offsets", [24, 0]), "tensor a: data_offsets [24, 0] end before they begin"),
        (changed("b", "data_offsets", [20, 24]), "tensor b: data_offsets begin at byte 20, inside tensor a"),
        (changed("b", "data_offsets", [25, 29]), "tensor b: data_offsets leave 1 bytes"),
        (good() | {"d": {"dtype": "U8", "shape": [4], "data_offsets": [28, 32]}}, "end at byte 32 of 28"),
        (good() | {"d": 7}, "tensor d: dtype None is unknown"),
        ([], "its header must be a JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_are_refused_by_tensor_and_field(tmp_path: Path, header: Any, reason: str) -> None:
    path = write(tmp_path / "file", header)
    with pytest.raises(CheckpointError) as error:
        read_tensor_header(path)
    assert str(error.value).startswith(f"{path}: cannot be read as safetensors: ")
    assert reason in str(error.value)
    assert len(str(error.value)) < 500


def test_a_sparse_file_of_15_gb_is_refused_by_its_header(tmp_path: Path) -> None:
    os.truncate(write(tmp_path / "file", good()), 15 << 30)
    with pytest.raises(CheckpointError, match="its header does not cover all of it"):
        read_tensor_header(tmp_path / "file")
    (tmp_path / "empty").touch()
    os.truncate(tmp_path / "empty", 15 << 30)
    with pytest.raises(CheckpointError, match="its header is not JSON"):
        read_tensor_header(tmp_path / "empty")


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(struct.pack("<Q", 1 << 33))
    os.truncate(tmp_path / "file", 15 << 30)
    with pytest.raises(CheckpointError, match="its header has 8589934592 bytes: at most 67108864 are read"):
        read_tensor_header(tmp_path / "file")


@pytest.mark.parametrize("content", [b"", b"abc", bytes(8), struct.pack("<Q", 100) + b"{}"])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_tensor_header(tmp_path / "file")


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LFS_POINTER + b"spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer, not the file itself: run `git lfs"):
        read_tensor_header(tmp_path / "file")


@st.composite
def changed_headers(draw: Callable[..., Any]) -> Any:
    """Return a header in which one to three values are changed or removed."""
    header: Any = copy.deepcopy(good())
    for _ in range(draw(st.integers(1, 3))):
        entry = header[draw(st.sampled_from(["a", "b"]))]
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        if draw(st.integers(0, 9)):
            entry[field] = draw(st.sampled_from(VALUES))
        else:
            entry.pop(field, None)
    return header


@given(header=changed_headers(), size=st.sampled_from([0, 24, 28, 29]))
def test_what_is_taken_safetensors_takes_too(
    tmp_path_factory: pytest.TempPathFactory, header: Any, size: int
) -> None:
    path = write(tmp_path_factory.mktemp("headers") / "file", header, bytes(size))
    try:
        tensors = read_tensor_header(path)
    except CheckpointError:
        return
    with safe_open(path, framework="np") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            name: tensor.shape for name, tensor in tensors.items()
        }


@given(header=changed_headers())
def test_what_safetensors_refuses_is_refused(tmp_path_factory: pytest.TempPathFactory, header: Any) -> None:
    path = write(tmp_path_factory.mktemp("headers") / "file", header)
    try:
        with safe_open(path, framework="np"):
            return
    except SafetensorError:
        pass
    with pytest.raises(CheckpointError):
        read_tensor_header(path)
