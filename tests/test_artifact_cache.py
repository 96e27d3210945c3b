"""Folders that tests make from equal arguments are made once; a test that changes its copy changes no other
copy."""

import os
import threading
from pathlib import Path

import pytest

from tests.artifact_cache import entry_key, make_once, remove_oldest


class Maker:
    """Writes a folder, and counts its calls."""

    def __init__(self, content: bytes = b"weights") -> None:
        self.content, self.calls = content, 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "inner").mkdir()
        (folder / "inner" / "model").write_bytes(self.content)
        (folder / "config").write_text("{}")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


EXPECTED = {"inner/model": b"weights", "config": b"{}"}
SOURCE = Path(__file__)


def test_equal_arguments_are_made_once(tmp_path: Path) -> None:
    maker, cache = Maker(), tmp_path / "cache"
    for name in ("a", "b"):
        make_once(tmp_path / name, SOURCE, ["llama", 1], maker, cache)
        assert content(tmp_path / name) == EXPECTED
    assert maker.calls == 1
    make_once(tmp_path / "c", SOURCE, ["llama", 2], maker, cache)
    assert maker.calls == 2
    assert len(list(cache.iterdir())) == 2  # and no temporary file is left


def test_a_changed_copy_changes_no_other(tmp_path: Path) -> None:
    maker, cache = Maker(), tmp_path / "cache"
    make_once(tmp_path / "a", SOURCE, [], maker, cache)
    with (tmp_path / "a" / "inner" / "model").open("r+b") as file:
        file.write(b"WEIGHTS")
    make_once(tmp_path / "b", SOURCE, [], maker, cache)
    assert content(tmp_path / "b") == EXPECTED
    assert maker.calls == 1


def test_the_key_names_arguments_source_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "maker.py"
    source.write_text("1")
    keys = [entry_key(source, [1]), entry_key(source, [2])]
    source.write_text("2")
    keys.append(entry_key(source, [1]))
    monkeypatch.setattr("tests.artifact_cache.version", lambda name: "99")
    keys.append(entry_key(source, [1]))
    assert len(set(keys)) == 4
    with pytest.raises(TypeError):
        entry_key(source, [object()])  # Arguments that JSON cannot represent cannot be compared.


def test_entries_used_longest_ago_are_removed(tmp_path: Path) -> None:
    maker, cache = Maker(b"x" * 50_000), tmp_path / "cache"
    for number in range(3):
        make_once(tmp_path / str(number), SOURCE, [number], maker, cache)
    for age, number in enumerate((1, 0, 2)):
        os.utime(cache / f"{entry_key(SOURCE, [number])}.tar", (age, age))
    make_once(tmp_path / "again", SOURCE, [1], maker, cache)  # used now
    assert maker.calls == 3
    remove_oldest(cache, 130_000)
    kept = {path.stem for path in cache.glob("*.tar")}
    assert kept == {entry_key(SOURCE, [number]) for number in (1, 2)}


def test_large_results_are_not_kept(tmp_path: Path) -> None:
    maker, cache = Maker(b"x" * 50_000), tmp_path / "cache"
    for number in range(2):
        make_once(tmp_path / str(number), SOURCE, [], maker, cache, max_bytes=100_000)
        assert (tmp_path / str(number) / "inner" / "model").read_bytes() == maker.content
    assert maker.calls == 2
    assert not list(cache.iterdir())


def test_makers_of_equal_arguments_may_run_at_once(tmp_path: Path) -> None:
    cache, both = tmp_path / "cache", threading.Barrier(2)

    def make(folder: Path) -> None:
        both.wait(10)  # No process waits for another: each finds no entry.
        Maker()(folder)

    threads = [
        threading.Thread(target=make_once, args=(tmp_path / str(number), SOURCE, [], make, cache))
        for number in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert content(tmp_path / "0") == content(tmp_path / "1") == EXPECTED
    assert len(list(cache.iterdir())) == 1


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        make_once(tmp_path / "a", SOURCE, [], fail, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    assert not (tmp_path / "a").exists()
