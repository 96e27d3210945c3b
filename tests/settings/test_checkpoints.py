"""Folders with files that would block a start are refused at once."""

import os
from pathlib import Path

import pytest

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.tensor_header import LFS_POINTER
from streamserve.settings.checkpoints import MAX_TEXT_BYTES, locate
from tests.checkpoints import make_checkpoint

READ = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors",
    ".hidden.safetensors",
    "additional_chat_templates/tool_use.jinja",
    "1_Pooling/config.json",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path)


def place(folder: Path, name: str) -> None:
    """Remove a file of the folder, so that an odd file can be made in its place."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)


def test_regular_files_and_links_to_them_are_taken(folder: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (folder / "config.json").rename(blob)
    (folder / "config.json").symlink_to(blob)
    (folder / "images").mkdir()
    assert locate(str(folder)) == folder


@pytest.mark.parametrize("name", READ)
def test_a_pipe_is_refused_by_name(folder: Path, name: str) -> None:
    place(folder, name)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a file, but a pipe"):
        locate(str(folder))


@pytest.mark.parametrize("name", READ)
def test_a_device_is_refused_by_name(folder: Path, name: str) -> None:
    place(folder, name)
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name} is not a file"):
        locate(str(folder))


def test_a_text_of_gigabytes_is_refused_by_name(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", MAX_TEXT_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has \d+ bytes"):
        locate(str(folder))


@pytest.mark.parametrize("name", [*READ, "model-Q4_K_M.gguf"])
def test_a_pointer_of_git_lfs_is_refused_by_name(folder: Path, name: str) -> None:
    place(folder, name)
    (folder / name).write_bytes(LFS_POINTER + b"spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(CheckpointError, match=rf"{name}: is a Git LFS pointer, not the file itself: run"):
        locate(str(folder / name) if name.endswith(".gguf") else str(folder))


def test_files_that_are_not_read_do_not_matter(folder: Path) -> None:
    os.mkfifo(folder / ".control")
    os.mkfifo(folder / "pipe")
    (folder / "added_tokens.json").symlink_to(os.devnull)
    assert locate(str(folder)) == folder
