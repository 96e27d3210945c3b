"""`streamserve profile` works for users, and a server measures a profile at its start."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from streamserve.cli.run_profile import plot
from streamserve.execution.profile.profile import Profile, user_profiles
from tests.api.serving import until
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.execution.profiles import profile_of
from tests.serving import serving

SMALL = ("--backend", "reference", "--threads", "1", "--max-model-len", "64", "--max-num-batched-tokens=4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of profiles, for this process and the processes that it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_profiles().folder


def stored_profiles(folder: Path) -> list[Profile]:
    return [msgspec.json.decode(path.read_bytes(), type=Profile) for path in sorted(folder.glob("*.json"))]


def test_profile_measures_model_and_draft_and_keeps_both(tmp_path: Path, folder: Path) -> None:
    target, draft = (
        make_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("big", "small"))
    )
    command = [sys.executable, "-m", "streamserve", "profile", str(target), "--draft", str(draft), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    profiles = {profile.model: profile for profile in stored_profiles(folder)}
    assert set(profiles) == {str(target), f"draft of {target}"}
    for profile in profiles.values():
        assert profile.cost.tokens == (1, 2, 4)
        assert [held // profile.kv_token_bytes for held in profile.cost.kv_bytes] == [0, 63]
        assert not profile.quick
        assert profile.subject.backend == "reference"
        assert f"{profile.bandwidth / 1e9:.1f} GB/s of memory" in done.stdout
        assert f"{1e3 * profile.cost(4):.2f}" in done.stdout
    assert len(list(folder.glob("*.png"))) == 2


def test_without_matplotlib_there_is_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plot(profile_of(), tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def test_a_server_measures_its_model_once_and_reports_the_step_floor(tmp_path: Path, folder: Path) -> None:
    model = str(make_checkpoint(tmp_path / "model"))
    with serving(model, "--profile", *SMALL) as served:
        (profile,) = stored_profiles(folder)
        assert profile.quick
        body = {"model": model, "prompt": "hello", "max_tokens": 20}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=20).status_code == 200
        until(lambda: step_figures(served.url).get("step_seconds_total", 0) > 0)
        figures = step_figures(served.url)
    assert 0 < figures["step_floor_seconds_total"] < figures["step_seconds_total"]
    assert figures["step_floor_share"] == pytest.approx(
        figures["step_floor_seconds_total"] / figures["step_seconds_total"]
    )
    stable = msgspec.structs.replace(profile, stable=True)
    user_profiles().write(stable)
    with serving(model, "--profile", *SMALL):
        assert stored_profiles(folder) == [stable]


def test_an_unstable_profile_is_measured_again_beside_serving(
    tmp_path: Path, folder: Path, scale: Scale
) -> None:
    if not scale.full:
        pytest.skip("with --full; tests/workers/test_profile_refresh.py has it without processes")
    model = str(make_checkpoint(tmp_path / "model"))
    with serving(model, "--profile", *SMALL):
        (profile,) = stored_profiles(folder)
    slow = tuple(tuple(3 * seconds for seconds in line) for line in profile.cost.seconds)
    unstable = msgspec.structs.replace(
        profile, stable=False, cost=msgspec.structs.replace(profile.cost, seconds=slow)
    )
    user_profiles().write(unstable)
    with serving(model, "--profile", *SMALL) as served:
        until(lambda: stored_profiles(folder) != [unstable])
        body = {"model": model, "prompt": "hello", "max_tokens": 20}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=20).status_code == 200
    (profile_after,) = stored_profiles(folder)
    assert profile_after.subject == profile.subject
    assert profile_after.cost(1) != unstable.cost(1)


def test_no_profile_stores_nothing(tmp_path: Path, folder: Path) -> None:
    with serving(str(make_checkpoint(tmp_path / "model")), "--no-profile", *SMALL) as served:
        assert "step_floor" not in httpx.get(f"{served.url}/metrics").text
    assert not folder.exists()


def test_a_kept_profile_is_plain_json(folder: Path) -> None:
    path = user_profiles().write(profile_of())
    values = json.loads(path.read_text())
    assert values["cost"]["tokens"] == [1, 2]
    assert values["subject"]["machine"]["cores"] == 4


def step_figures(url: str) -> dict[str, float]:
    """Return the server's metrics of steps."""
    return {
        line.split("{")[0].removeprefix("streamserve:"): float(line.rsplit(" ", 1)[1])
        for line in httpx.get(f"{url}/metrics").text.splitlines()
        if line.startswith("streamserve:step")
    }
