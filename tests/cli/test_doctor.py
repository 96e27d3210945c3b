"""`streamserve doctor` reports what a server needs, gives advice, and has an exit status."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from streamserve.cli.findings import (
    Finding,
    Verdict,
    address_finding,
    files_finding,
    folder_finding,
    import_finding,
    memory_finding,
    processor_finding,
    version_findings,
)
from streamserve.cli.run_doctor import gpu_findings
from streamserve.system.processors import Processors

ALL = Processors((0, 1, 2, 3))


def doctor(
    *flags: str, before: str = "", **environment: str
) -> tuple[int, dict[str, tuple[str, str]], list[str]]:
    """Return the exit status, verdict and text by subject, and the advice."""
    code = f"import sys; {before}\nsys.argv[0] = 'streamserve'\nfrom streamserve.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--port", "0", *flags],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.stderr, done.stderr
    lines = [line for line in done.stdout.splitlines()[:-2] if line]
    found = [line.split(maxsplit=2) for line in lines if line[0] != " "]
    advice = [line.strip() for line in lines if line[0] == " "]
    return done.returncode, {subject: (verdict, text) for verdict, subject, text in found}, advice


def test_this_machine_can_serve() -> None:
    status, found, advice = doctor()
    assert status == 0
    subjects = {"versions", "torch", "processor", "kernels", "memory", "cache", "models", "address"}
    assert subjects <= found.keys()
    assert "fail" not in {verdict for verdict, _ in found.values()}
    assert len(advice) == sum(verdict != "ok" for verdict, _ in found.values())
    assert all(line.startswith("→ ") and len(line) > 10 for line in advice)


def test_a_port_in_use_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, found, advice = doctor("--port", str(port))
    assert status == 1
    assert found["address"] == (
        "fail",
        f"port {port} on 127.0.0.1 is already in use: choose another with --port",
    )
    assert any("--port" in line for line in advice)


def test_without_torch_it_still_reports(tmp_path: Path) -> None:
    status, found, advice = doctor(before="sys.modules['torch'] = None")
    assert status == 1
    assert found["torch"][0] == "fail"
    assert found["address"][0] == "ok"
    assert any("pip install" in line for line in advice)


def test_without_kernels_or_a_compiler_it_says_that_serving_is_slow(tmp_path: Path) -> None:
    status, found, advice = doctor(PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert status == 0
    assert found["kernels"][0] == "slow"
    assert "plain PyTorch" in found["kernels"][1]
    assert any("install g++" in line for line in advice)


def test_kernels_that_are_not_compiled_yet_are_not_compiled_by_looking(tmp_path: Path) -> None:
    status, found, advice = doctor(XDG_CACHE_HOME=str(tmp_path))
    assert status == 0
    assert found["kernels"][0] == "slow"
    assert any("python -m streamserve.execution.backends.native" in line for line in advice)
    assert not list(tmp_path.rglob("*"))


def test_a_processor_that_is_taken_for_a_lesser_one_is_named() -> None:
    """A setting that limits the kernel path is reported. For portable code the library may have to be
    compiled first."""
    status, found, _ = doctor(STREAMSERVE_KERNEL_PATH="portable")
    assert (status, found["kernels"][0]) == (0, "slow")
    text = found["kernels"][1]
    assert "level baseline" in text or "will be compiled" in text
    status, found, _ = doctor(STREAMSERVE_KERNEL_PATH="avx3")
    assert (status, found["kernels"][0]) == (1, "fail")
    assert "must be one of auto, portable" in found["kernels"][1]


def test_a_cache_that_others_can_write_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "streamserve" / "native").mkdir(parents=True)
    (tmp_path / "streamserve" / "native").chmod(0o777)
    status, found, _ = doctor(XDG_CACHE_HOME=str(tmp_path))
    assert status == 1
    assert found["kernels"][0] == "fail"
    assert "other users" in found["kernels"][1]


@pytest.mark.parametrize(
    ("usable", "verdict", "words"),
    [
        (ALL, Verdict.OK, "4 processors, of 4 present"),
        (Processors((0, 1)), Verdict.SLOW, "same time: 2"),
        (
            Processors((0, 1, 2, 3), 1.5),
            Verdict.SLOW,
            "a CPU quota of 1.5, of 4 present; threads that can run at the same time: 1",
        ),
        (Processors((0, 1, 2, 3), 0.5), Verdict.SLOW, "stops every thread"),
    ],
)
def test_processors(usable: Processors, verdict: Verdict, words: str) -> None:
    finding = processor_finding("A processor", usable, 4)
    assert finding.verdict == verdict
    assert words in finding.text
    assert bool(finding.advice) == (verdict != Verdict.OK)


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (memory_finding(64 << 30), Verdict.OK),
        (memory_finding(1 << 30), Verdict.SLOW),
        (files_finding(20_000), Verdict.OK),
        (files_finding(-1), Verdict.OK),
        (files_finding(256), Verdict.SLOW),
        (import_finding("json"), Verdict.OK),
        (import_finding("no_such_package"), Verdict.FAIL),
        (version_findings(["pytest"])[-1], Verdict.OK),
        (version_findings(["pytest", "no-such-package"])[-1], Verdict.FAIL),
        (address_finding("127.0.0.1", 0), Verdict.OK),
        (address_finding("256.0.0.1", 0), Verdict.FAIL),
    ],
    ids=lambda value: value.subject if isinstance(value, Finding) else str(value),
)
def test_what_is_not_good_has_advice(finding: Finding, verdict: Verdict) -> None:
    assert finding.verdict == verdict
    assert bool(finding.advice) == (verdict != Verdict.OK)


def test_a_folder_is_judged_by_the_parent_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b"
    assert folder_finding("cache", folder, "slower", "CACHE").verdict == Verdict.OK
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").write_text("a file")
    refused = folder_finding("cache", folder, "slower", "CACHE")
    assert refused.verdict == Verdict.SLOW
    assert "CACHE" in refused.advice
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert folder_finding("cache", tmp_path, "slower", "CACHE").verdict == Verdict.SLOW


def test_a_folder_that_cannot_be_looked_at_is_reported(tmp_path: Path) -> None:
    finding = folder_finding("cache", tmp_path / ("x" * 300) / "streamserve", "slower", "CACHE")
    assert (finding.verdict, finding.advice) == (Verdict.SLOW, "set CACHE to another folder")
    assert finding.text.endswith("cannot be used (File name too long): slower")
    missing = folder_finding("cache", tmp_path / "a" / "b", "slower", "CACHE")
    assert missing.text.startswith(f"{tmp_path}/a/b: ")


@pytest.mark.parametrize(("folder", "verdict"), [("kept", Verdict.OK), ("file/kept", Verdict.SLOW)])
def test_where_gpu_kernels_are_kept(
    folder: str, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
    (finding,) = gpu_findings()
    assert (finding.verdict, finding.subject) == (verdict, "gpu")
    assert str(tmp_path / folder) in finding.text


def test_without_a_gpu_there_is_nothing_to_say_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not gpu_findings()
