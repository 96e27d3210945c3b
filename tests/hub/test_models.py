"""`streamserve models pull | list | show | rm` against a hub over HTTP."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import command_server
from tests.hub.conftest import NOT_LOADED, TOKEN, Run
from tests.hub.server import FakeHub, Repository


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Return the single line of an error."""
    assert done.returncode == 2, done
    (line,) = [line for line in lines(done.stderr) if line.startswith("streamserve:")]
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stderr
    return line


def test_only_what_is_loaded_is_downloaded_and_only_once(
    models: Run, hub: FakeHub, llama: dict[str, bytes]
) -> None:
    done = models("pull", "tests/llama")
    assert done.returncode == 0, done.stderr
    (path,) = lines(done.stdout)
    fetched = {str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file()}
    assert fetched == set(llama) - set(NOT_LOADED)
    assert all((Path(path) / name).read_bytes() == llama[name] for name in fetched)
    size = sum(len(llama[name]) for name in fetched) / 1e6
    first = lines(done.stderr)[0]
    assert first.startswith(f"tests/llama: {len(fetched)} files, {size:.1f} MB: ")
    assert " to download; " in first
    assert " free at " in first

    before = len([each for each in hub.requests if each.method == "GET" and "/resolve/" in each.path])
    again = models("pull", "tests/llama")
    assert lines(again.stdout) == [path]
    assert "all in the cache" in again.stderr
    assert len([each for each in hub.requests if each.method == "GET" and "/resolve/" in each.path]) == before


def test_a_broken_transfer_is_resumed_where_it_broke(models: Run, hub: FakeHub) -> None:
    hub.repositories["tests/llama"].revisions["v1"]["model.safetensors"] = content = (
        bytes(range(256)) * 100_000
    )
    hub.breaks["model.safetensors"] = 15_000_000
    done = models("pull", "tests/llama", "--revision", "v1")
    assert done.returncode == 0, done.stderr
    assert (Path(lines(done.stdout)[-1]) / "model.safetensors").read_bytes() == content
    first, second = hub.transfers("model.safetensors")
    assert first.range is None
    start = int((second.range or "").removeprefix("bytes=").removesuffix("-"))
    assert 1_000_000 < start <= 15_000_000


def test_after_a_kill_complete_files_are_not_downloaded_again(
    models: Run, hub: FakeHub, environment: dict[str, str]
) -> None:
    hub.stalls["model.safetensors"] = 100
    command = [sys.executable, "-m", "streamserve", "models", "pull", "tests/llama@v1"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        assert hub.stalled.wait(60)
    finally:
        process.kill()
        process.wait()
    hub.stalls.clear()
    hub.release.set()
    done = models("pull", "tests/llama@v1")
    assert done.returncode == 0, done.stderr
    assert (Path(lines(done.stdout)[-1]) / "model.safetensors").read_bytes() == b"x" * 1000
    assert len(hub.transfers("model.safetensors")) == 2
    assert len(hub.transfers("config.json")) <= 2


def test_tokens_are_sent_and_never_printed(models: Run, hub: FakeHub) -> None:
    line = refused(models("pull", "tests/gated"))
    assert "access to this model is restricted (401): give a token with --token or HF_TOKEN" in line
    assert "restricted (403)" in refused(models("pull", "tests/gated", "--token", "hf_other"))
    for done in (
        models("pull", "tests/gated", "--token", TOKEN),
        models("pull", "tests/private", HF_TOKEN=TOKEN),
    ):
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stderr + done.stdout
    assert f"Bearer {TOKEN}" in {each.authorization for each in hub.requests}
    assert "the token contains characters" in refused(models("pull", "tests/gated", "--token", f"{TOKEN}\n"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests/none"], "tests/none: there is no such repository on the hub, or it is private"),
        (["tests/private"], "tests/private: there is no such repository on the hub, or it is private"),
        (["tests/llama@v2"], "tests/llama@v2: the repository has no revision v2"),
        (["tests/llama@v1", "--revision", "v1"], "leave one of them out"),
        (["tests/torch"], "tests/torch: the repository has no weights in safetensors"),
        (["tests/gguf"], "give one as tests/gguf:BF16: BF16, Q4_K_M, Q8_0"),
        (
            ["tests/gguf:Q5_K_M"],
            "tests/gguf:Q5_K_M: the repository has no Q5_K_M; it has: BF16, Q4_K_M, Q8_0",
        ),
        (["tests/llama:Q8_0"], "tests/llama:Q8_0: the repository has no GGUF files"),
        (["nowhere"], "nowhere is not a name on the hub"),
        (["../etc/passwd"], "../etc/passwd is not a name on the hub"),
    ],
)
def test_what_cannot_be_downloaded_is_refused_in_one_line(
    models: Run, arguments: list[str], message: str
) -> None:
    assert message in refused(models("pull", *arguments))


def test_a_full_disk_is_found_before_the_download(models: Run, hub: FakeHub, tmp_path: Path) -> None:
    size = shutil.disk_usage(tmp_path).total
    index = f'{{"weight_map": {{"a": "model-1.safetensors"}}, "metadata": {{"total_size": {size}}}}}'
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": index.encode(),
        "model-1.safetensors": b"x",
    }
    hub.repositories["tests/large"] = Repository({"main": files})
    hub.sizes["model-1.safetensors"] = size
    line = refused(models("pull", "tests/large"))
    assert f"the download needs {size / 1e9:.2f} GB, but " in line
    assert " are free at " in line
    assert not hub.transfers("model-1.safetensors")


def test_a_quantization_is_downloaded_with_all_its_parts(models: Run) -> None:
    (path,) = lines(models("pull", "tests/gguf:bf16").stdout)
    assert path.endswith("/BF16/tiny-BF16-00001-of-00002.gguf")
    assert {file.name for file in Path(path).parents[1].rglob("*.gguf")} == {
        "tiny-BF16-00001-of-00002.gguf",
        "tiny-BF16-00002-of-00002.gguf",
    }
    (path,) = lines(models("pull", "tests/gguf:tiny-Q8_0.gguf").stdout)
    assert path.endswith("/tiny-Q8_0.gguf")


def test_models_are_listed_shown_and_removed(models: Run) -> None:
    for name in ("tests/llama", "tests/llama@v1", "tests/gguf:Q8_0", "tests/gguf:Q4_K_M"):
        assert models("pull", name).returncode == 0
    table = lines(models("list").stdout)
    assert table[0].split() == ["NAME", "SIZE", "FORMAT", "ARCHITECTURE", "SERVED"]
    names = [line.split()[0] for line in table[1:]]
    assert names == ["tests/gguf:Q4_K_M", "tests/gguf:Q8_0", "tests/llama", "tests/llama@v1"]
    assert table[2].split()[3:] == ["GGUF", "Q8_0", "llama", "yes"]
    assert table[3].split()[3:] == ["safetensors", "LlamaForCausalLM", "yes"]
    assert "LlamaForCausalLM  no: model.safetensors: cannot be read as safetensors" in table[4]

    shown = dict(line.split(maxsplit=1) for line in lines(models("show", "tests/llama").stdout) if line)
    assert shown["architecture"] == "LlamaForCausalLM"
    assert shown["context"] == "512 tokens"
    assert shown["weights"] == "float32"
    assert shown["chat"] == "template  yes"
    assert "cache for a full context" in shown["memory"]
    assert "tests/llama@v2 is not in the cache" in refused(models("show", "tests/llama@v2"))

    kept = models("rm", "tests/gguf:Q8_0", input="n\n")
    assert kept.returncode == 1
    assert "remove tests/gguf:Q8_0" in kept.stderr
    assert "removed" in models("rm", "tests/gguf:Q8_0", input="y\n").stdout
    assert models("rm", "tests/llama@v1", "--yes").returncode == 0
    assert [line.split()[0] for line in lines(models("list").stdout)[1:]] == [
        "tests/gguf:Q4_K_M",
        "tests/llama",
    ]
    assert models("rm", "tests/llama", "--yes").returncode == 0
    assert models("rm", "tests/gguf:Q4_K_M", "--yes").returncode == 0
    assert lines(models("list").stdout)[1:] == []
    assert "is not in the cache" in refused(models("rm", "tests/llama", "--yes"))


def test_what_is_cached_is_served_without_the_hub(environment: dict[str, str], models: Run) -> None:
    for name in ("tests/llama", "tests/gguf:Q8_0"):
        assert models("pull", name).returncode == 0
    code = (
        "import sys\nfrom streamserve.settings.checkpoints import locate, root_name\n"
        "from streamserve.protocol.errors import CheckpointError\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        print(locate(name).name, root_name(name, 'x'))\n"
        "    except CheckpointError as error:\n        print(error)\n"
    )
    names = ["tests/llama", "tests/gguf:Q8_0", "tests/gguf:Q4_K_M", "tests/other"]
    for variables in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        command = [sys.executable, "-c", code, *names]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment | variables, check=True
        )
        folder, file, missing, unknown = lines(done.stdout)
        assert len(folder.split()[0]) == 40
        assert folder.endswith(" tests/llama")
        assert file == "tiny-Q8_0.gguf tests/gguf"
        assert "tests/gguf:Q4_K_M: the repository has no Q4_K_M; it has: Q8_0" in missing
        assert unknown.startswith("tests/other")
        assert "not in the cache" in unknown


def test_a_hub_that_cannot_be_reached_is_named(models: Run) -> None:
    line = refused(models("pull", "tests/llama", HF_ENDPOINT="http://127.0.0.1:9"))
    assert "tests/llama: the hub cannot be reached: " in line
    line = refused(models("pull", "tests/llama", HF_HUB_OFFLINE="1"))
    assert "tests/llama: HF_HUB_OFFLINE forbids access to the hub" in line


def test_a_quantization_on_the_hub_is_generated_with(environment: dict[str, str]) -> None:
    command = ["generate", "the quick", "--model", "tests/gguf:Q8_0", "--no-profile"]
    done = command_server.run(command, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
