"""Kernels are compiled once, by the first process, and are never loaded from a place that other users can
write to."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.native import build as building
from streamserve.execution.backends.native import library
from streamserve.execution.backends.native.build import (
    LOCK,
    BuildFailed,
    NativeCacheError,
    build,
    find_compiler,
    kernel_folder,
    locked,
)
from streamserve.protocol.errors import CheckpointError
from tests.exhaustion.limits import can_mount

QUICK = ("-std=c++17", "-O0", "-shared", "-fPIC", "-pthread", "-w")


@pytest.fixture(autouse=True)
def _compiler() -> None:
    try:
        find_compiler()
    except BuildFailed:
        pytest.skip("there is no compiler")


@pytest.fixture
def small_source(tmp_path, monkeypatch) -> Path:
    """A source that compiles quickly, in place of the kernels."""
    sources = tmp_path / "cpp"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(building, "SOURCES", sources)
    return sources


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache" / "native"


def test_a_cache_that_others_can_write_refuses_the_model_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "streamserve" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "packaged_library", lambda bound: None)
    with pytest.raises(CheckpointError, match=f"chmod go-w {folder}"):
        library.kernels_up_to.__wrapped__("auto")


def test_it_is_compiled_once_and_again_when_anything_it_depends_on_changes(small_source, cache, monkeypatch):
    first = build(cache)
    written = first.stat().st_ino
    assert build(cache) == first
    assert first.stat().st_ino == written
    assert build(cache, QUICK) != first
    monkeypatch.setattr(building, "processor", lambda: "another")
    assert build(cache) != first
    monkeypatch.undo()
    monkeypatch.setattr(building, "SOURCES", small_source)
    (small_source / "one.h").write_text("// more\n")
    assert build(cache) != first
    assert {path.suffix for path in cache.iterdir()} == {".so", ""}


def test_a_compiled_library_is_used_while_another_is_being_compiled(small_source, cache):
    first = build(cache)
    with locked(cache / LOCK):  # By this process: a second `locked` would wait forever.
        assert build(cache) == first


def test_of_old_libraries_those_used_last_stay(small_source, cache, monkeypatch):
    monkeypatch.setattr(building, "MAX_LIBRARIES", 2)
    compiled = []
    for number in range(2):
        (small_source / "one.h").write_text(f"// {number}\n")
        compiled.append(build(cache))
    (small_source / "one.h").write_text("// 0\n")
    assert build(cache) == compiled[0]  # Used again, so the other library is the oldest.
    (small_source / "one.h").write_text("// 2\n")
    for path in compiled:
        path.with_suffix(".json").write_text("{}")
    assert {build(cache), compiled[0]} == set(cache.glob("*.so"))
    assert list(cache.glob("*.json")) == [compiled[0].with_suffix(".json")], "rates go with their library"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_refused(small_source, cache, mode):
    library_file = build(cache)
    cache.chmod(mode)
    with pytest.raises(NativeCacheError, match="other users"):
        build(cache)
    cache.chmod(0o700)
    assert build(cache) == library_file


def test_a_file_that_others_can_write_or_that_leads_elsewhere_is_refused(small_source, cache, tmp_path):
    library_file = build(cache)
    library_file.chmod(0o720)
    with pytest.raises(NativeCacheError, match=library_file.name):
        build(cache)
    elsewhere = Path(shutil.move(library_file, tmp_path / "elsewhere.so"))
    elsewhere.chmod(0o700)
    library_file.symlink_to(elsewhere)
    with pytest.raises(NativeCacheError, match=library_file.name):
        build(cache)


def test_another_users_cache_is_refused(small_source, cache, monkeypatch):
    build(cache)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NativeCacheError, match="another user"):
        build(cache)


def test_what_is_made_is_for_its_owner_only(small_source, cache):
    file = build(cache)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o700


def test_a_failed_compilation_leaves_nothing_and_says_why(small_source, cache):
    (small_source / "two.cpp").write_text("this is no program\n")
    with pytest.raises(BuildFailed, match=r"two\.cpp"):
        build(cache)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_without_compiler_plain_torch_computes_and_says_so_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    library.kernels_up_to.cache_clear()
    try:
        assert library.kernels() is None
        assert library.kernels() is None
    finally:
        library.kernels_up_to.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "text": lambda file: file.write_text("not a library\n"),
    "flipped": lambda file: file.write_bytes(file.read_bytes()[:5000] + b"\xff" + file.read_bytes()[5001:]),
    "without its hash": lambda file: os.truncate(file, file.stat().st_size - building.DIGEST_BYTES),
    "a folder": lambda file: (file.unlink(), file.mkdir(), (file / "inside").touch()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file, 0o600)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_compiled_again_and_named_once(small_source, cache, caplog, damage):
    file = build(cache)
    DAMAGE[damage](file)
    assert building.cached_library(cache) is None
    assert build(cache) == file
    assert ctypes.CDLL(str(file)).answer() == 42
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{file} is damaged: the kernels are compiled again"
    ]


@given(data=st.data())
def test_no_damaged_library_is_used(tmp_path_factory, data):
    with pytest.MonkeyPatch.context() as patch:
        sources = tmp_path_factory.mktemp("cpp")
        (sources / "one.cpp").write_text("int one;\n")
        patch.setattr(building, "SOURCES", sources)
        cache = tmp_path_factory.mktemp("cache")
        file = cache / building._file_name(find_compiler(), building.flags_up_to())
        content = data.draw(st.binary(max_size=2000))
        written = content + building._digest(content)
        file.write_bytes(written)
        file.chmod(0o700)
        assert building.cached_library(cache) == file
        changed = bytearray(written[: data.draw(st.integers(0, len(written)))])
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(0, 255))
        changed += data.draw(st.binary(max_size=3))
        file.write_bytes(changed)
        assert building.cached_library(cache) == (file if changed == written else None)


def test_without_compiler_the_library_of_another_one_is_used(small_source, cache, tmp_path, monkeypatch):
    file = build(cache)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build(cache) == file
    assert building.cached_library(cache) == file
    os.truncate(file, 100)
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler"):
        build(cache)
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler"):
        building.cached_library(cache)


def test_where_compiling_fails_the_library_of_another_compiler_is_used(small_source, cache, monkeypatch):
    file = build(cache)
    monkeypatch.setenv("CXX", str(shutil.which("false")))
    assert build(cache) == file
    (small_source / "one.h").write_text("// other sources\n")
    with pytest.raises(BuildFailed, match="failed"):
        build(cache)


BUILD = """
import sys; from pathlib import Path
from streamserve.execution.backends.native import build as building
building.SOURCES = Path(sys.argv[1])
print(building.build(Path(sys.argv[2])))
"""


@pytest.mark.skipif(not can_mount(), reason="a read-only file system needs the right to mount")
def test_a_library_in_a_read_only_cache_is_used(small_source, cache):
    file = build(cache)
    command = [sys.executable, "-c", BUILD, str(small_source), str(cache)]
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    read_only = ["unshare", "-m", "sh", "-c", mount, str(cache), *command]
    assert subprocess.run(read_only, capture_output=True, text=True, check=True).stdout.strip() == str(file)
    os.truncate(file, 100)
    refused = subprocess.run(read_only, capture_output=True, text=True, check=False)
    assert "Read-only file system" in refused.stderr.splitlines()[-1]


def test_processes_that_build_at_once_get_one_library(tmp_path):
    sources, cache = tmp_path / "cpp", tmp_path / "cache"
    sources.mkdir()
    (sources / "one.cpp").write_text('#include <regex>\nstd::regex some("a*b");\n')
    starts = [
        subprocess.Popen([sys.executable, "-c", BUILD, sources, cache], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    names = {process.communicate()[0].strip() for process in starts}
    assert len(names) == 1
    assert [process.returncode for process in starts] == [0, 0]
    assert len(list(cache.glob("*.so"))) == 1


def test_any_processor_can_have_the_portable_path():
    """Any processor can use the portable path: compiled for the oldest 64-bit x86 (or another architecture),
    a library has no other path. It is kept in the user's cache for all clones until the kernels change."""
    compiled = library.load_library(build(kernel_folder().with_name("native-portable"), QUICK))
    supported = [path for path in library.Path if compiled.ss_path_supported(path, 1)]
    assert supported == [library.Path.PORTABLE]
