"""`streamserve profile` as a user meets it, and the profile that a server makes of itself."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from streamserve.cli.profile import plot
from streamserve.execution.profile.profile import Profile, users_profiles
from tests.api.serving import until
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.execution.test_profile import profile_of
from tests.serving import serving

SMALL = ("--backend", "reference", "--threads", "1", "--max-model-len", "64", "--max-num-batched-tokens=16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are kept, for this process and those it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return users_profiles().folder


def kept_in(folder: Path) -> list[Profile]:
    return [msgspec.json.decode(path.read_bytes(), type=Profile) for path in sorted(folder.glob("*.json"))]


def test_profile_measures_model_and_draft_and_keeps_both(tmp_path: Path, folder: Path) -> None:
    target, draft = (
        make_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("big", "small"))
    )
    command = [sys.executable, "-m", "streamserve", "profile", str(target), "--draft", str(draft), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    profiles = {profile.model: profile for profile in kept_in(folder)}
    assert set(profiles) == {str(target), f"draft of {target}"}
    for profile in profiles.values():
        assert profile.cost.tokens == (1, 2, 4, 6, 8, 12, 16)
        assert [held // profile.kv_token_bytes for held in profile.cost.kv_bytes] == [0, 63]
        assert not profile.quick
        assert profile.subject.backend == "reference"
        assert f"{profile.bandwidth / 1e9:.1f} GB/s of memory" in done.stdout
        assert f"{1e3 * profile.cost(16):.2f}" in done.stdout
    assert len(list(folder.glob("*.png"))) == 2


def test_without_matplotlib_there_is_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot(profile_of(), tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def test_a_server_measures_its_model_once_and_then_tells_its_share(tmp_path: Path, folder: Path) -> None:
    model = str(make_checkpoint(tmp_path / "model"))
    with serving(model, "--profile", *SMALL) as served:
        (profile,) = kept_in(folder)
        assert profile.quick
        body = {"model": model, "prompt": "hello", "max_tokens": 20}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=20).status_code == 200
        until(lambda: step_figures(served.url).get("step_seconds_total", 0) > 0)
        figures = step_figures(served.url)
    assert 0 < figures["step_floor_seconds_total"] < figures["step_seconds_total"]
    assert figures["step_floor_share"] == pytest.approx(
        figures["step_floor_seconds_total"] / figures["step_seconds_total"]
    )
    right = msgspec.structs.replace(profile, stable=True)
    users_profiles().write(right)
    with serving(model, "--profile", *SMALL):
        assert kept_in(folder) == [right]


def test_an_unstable_profile_is_measured_anew_beside_serving(
    tmp_path: Path, folder: Path, scale: Scale
) -> None:
    if not scale.full:
        pytest.skip("with --full; tests/workers/test_profile_refresh.py has it without processes")
    model = str(make_checkpoint(tmp_path / "model"))
    with serving(model, "--profile", *SMALL):
        (profile,) = kept_in(folder)
    slow = tuple(tuple(3 * seconds for seconds in line) for line in profile.cost.seconds)
    wrong = msgspec.structs.replace(profile, stable=False, cost=replace(profile.cost, seconds=slow))
    users_profiles().write(wrong)
    with serving(model, "--profile", *SMALL) as served:
        until(lambda: kept_in(folder) != [wrong])
        body = {"model": model, "prompt": "hello", "max_tokens": 20}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=20).status_code == 200
    (found,) = kept_in(folder)
    assert found.subject == profile.subject
    assert found.cost(1) != wrong.cost(1)


def test_no_profile_leaves_nothing_behind(tmp_path: Path, folder: Path) -> None:
    with serving(str(make_checkpoint(tmp_path / "model")), "--no-profile", *SMALL) as served:
        assert "step_floor" not in httpx.get(f"{served.url}/metrics").text
    assert not folder.exists()


def test_a_kept_profile_is_plain_json(folder: Path) -> None:
    path = users_profiles().write(profile_of())
    values = json.loads(path.read_text())
    assert values["cost"]["tokens"] == [1, 2]
    assert values["subject"]["machine"]["cores"] == 4


def step_figures(url: str) -> dict[str, float]:
    """What the server tells of its steps."""
    return {
        line.split("{")[0].removeprefix("streamserve:"): float(line.rsplit(" ", 1)[1])
        for line in httpx.get(f"{url}/metrics").text.splitlines()
        if line.startswith("streamserve:step")
    }
