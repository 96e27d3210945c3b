"""STREAMSERVE_KERNEL_PATH makes a process and its workers use the instructions of a lesser processor."""

import pytest

from streamserve.fleet.worker_process import worker_environment
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.resolve import resolve
from streamserve.system.instructions import KERNEL_PATH_VARIABLE, kernel_bound, pytorch_bounds


@pytest.mark.parametrize(("environ", "bound"), [({}, "auto"), ({KERNEL_PATH_VARIABLE: ""}, "auto")])
def test_without_the_variable_there_is_no_bound(environ: dict[str, str], bound: str) -> None:
    assert kernel_bound(environ) == bound
    assert pytorch_bounds(environ) == {}


def test_pytorch_is_bounded_too() -> None:
    assert pytorch_bounds({KERNEL_PATH_VARIABLE: "avx2"})["ATEN_CPU_CAPABILITY"] == "avx2"
    assert pytorch_bounds({KERNEL_PATH_VARIABLE: "portable"})["ONEDNN_MAX_CPU_ISA"] == "SSE41"
    assert pytorch_bounds({KERNEL_PATH_VARIABLE: "amx"}) == {}


def test_it_is_no_setting_and_refused_where_it_names_nothing() -> None:
    settings = resolve("embedded", environ={KERNEL_PATH_VARIABLE: "avx2"})
    assert settings.model.kernel_path == "auto"
    for wrong in ("avx3", "AVX2"):
        with pytest.raises(
            CheckpointError, match=f"{KERNEL_PATH_VARIABLE} = '{wrong}': must be one of auto, portable"
        ):
            resolve("embedded", environ={KERNEL_PATH_VARIABLE: wrong})


def test_workers_inherit_it_and_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    # The variable is set when these tests run as on a lesser processor.
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setenv(KERNEL_PATH_VARIABLE, "avx512")
    monkeypatch.setenv("STREAMSERVE_API_KEY", "a-key")
    environment = worker_environment()
    assert environment[KERNEL_PATH_VARIABLE] == "avx512"
    assert environment["ATEN_CPU_CAPABILITY"] == "avx512"
    assert "STREAMSERVE_API_KEY" not in environment
