"""A user's files are in the right folders, whatever the environment variables say."""

import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from streamserve.system.user_folders import cache_folder, state_folder


def test_folders_are_those_of_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder({}) == Path("/home/someone/.cache/streamserve")
    assert state_folder({}) == Path("/home/someone/.local/state/streamserve")
    assert cache_folder({"XDG_CACHE_HOME": "/fast"}) == Path("/fast/streamserve")


def test_a_relative_folder_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path does not count; otherwise every folder in which a command is called would get a
    cache."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == cache_folder({"XDG_CACHE_HOME": ""})
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == cache_folder({})


def test_a_relative_home_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder({}).is_relative_to(tmp_path)


def test_without_a_home_they_are_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder({}).is_relative_to(tmp_path)
