"""`streamserve serve` works for users: the banner, the command that it prints, signals, errors."""

import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from streamserve.cli.run_server import memory_to_swap, memory_together
from streamserve.cli.serving import is_loopback, warn_of_threads
from streamserve.settings.resolve import resolve
from streamserve.system.instructions import KERNEL_PATH_VARIABLE
from streamserve.system.processors import usable_processors
from tests.api.serving import until
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.processes import workers_below
from tests.serving import Served, serving

KEY = "key-of-the-test"


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_printed_command_streams_an_answer(record: Callable[..., None]) -> None:
    with serving("embedded", "--threads", "1") as served:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        started = time.monotonic()
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as reply:
            first = next(line for line in reply.iter_lines() if line)
        assert first.startswith("data: {")
        record(
            seconds_to_ready=round(served.seconds, 2),
            seconds_to_first_token=round(served.seconds + time.monotonic() - started, 2),
        )
        (command,) = [line.strip() for line in served.banner.splitlines() if "curl" in line]
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=True)
        events = [line for line in done.stdout.splitlines() if line]
        assert all(line.startswith("data: ") for line in events)
        assert events[-1] == "data: [DONE]"
        assert len(events) > 3
        until(lambda: accepted_draft_tokens(served.url) > 0)
        (worker,) = workers_below(served.process.pid)
        assert [maps_torch(pid) for pid in (served.process.pid, worker.pid)] == [False, True]


def maps_torch(process: int) -> bool:
    """Return whether torch's library is in the memory of a process."""
    return "libtorch" in Path(f"/proc/{process}/maps").read_text(encoding="utf-8")


def accepted_draft_tokens(url: str) -> float:
    """Return the number of accepted draft tokens in the metrics."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    name = "streamserve:spec_decode_num_accepted_tokens"
    return sum(sample.value for family in families if family.name == name for sample in family.samples)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_its_worker(
    tmp_path: Path, scale: Scale, number: signal.Signals
) -> None:
    if not scale.full and number == signal.SIGTERM:
        pytest.skip("with --full; the server with a certificate is ended by it too")
    with serving(str(make_checkpoint(tmp_path)), "--threads", "1") as served:
        workers = workers_below(served.process.pid)
        assert len(workers) == 1
        assert served.end(number) == 0
        assert not workers[0].is_running()


def test_a_killed_worker_is_restarted_by_the_same_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(str(make_checkpoint(tmp_path)), "--threads", "1") as served:
        workers_below(served.process.pid)[0].kill()
        body = {"model": str(tmp_path), "prompt": "hello", "max_tokens": 5, "temperature": 0}
        deadline = time.monotonic() + 60
        while (reply := httpx.post(f"{served.url}/v1/completions", json=body, timeout=20)).status_code != 200:
            assert reply.status_code == 503
            assert reply.headers["Retry-After"]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert reply.json()["usage"]["completion_tokens"] == 5
    log = capfd.readouterr().err
    for words in ("SIGKILL", "worker unified-0: restarting in ", "worker unified-0 serves again"):
        assert words in log
        log = log.partition(words)[2]  # in this order


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key in its environment. Its workers count as stuck after three seconds."""
    folder = make_checkpoint(tmp_path_factory.mktemp("locked"))
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STREAMSERVE_API_KEY", KEY)
            served = stack.enter_context(serving(str(folder), "--threads", "1", "--stuck-after", "3"))
        yield served


def test_a_stuck_worker_fails_the_health_check_until_it_continues(locked: Served) -> None:
    (worker,) = workers_below(locked.process.pid)
    assert httpx.get(f"{locked.url}/health").status_code == 200
    worker.suspend()
    assert eventually(lambda: httpx.get(f"{locked.url}/health").status_code == 503)
    worker.resume()
    assert eventually(lambda: httpx.get(f"{locked.url}/health").status_code == 200)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_cli("serve", "embedded", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert f"port {port} on 127.0.0.1 is already in use" in done.stderr


def test_a_bad_checkpoint_is_exit_status_2_and_names_file_and_field(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "ParrotForCausalLM"))
    done = run_cli("serve", str(folder), "--port", "0")
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "ParrotForCausalLM" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_exit_status_2() -> None:
    done = run_cli("serve", "/no/such/folder")
    assert done.returncode == 2
    assert "/no/such/folder" in done.stderr


def test_generate_prints_an_answer() -> None:
    done = run_cli("generate", "What is 12 + 7?", "--max-tokens", "8", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 1


def test_chat_keeps_the_conversation_and_exits_at_an_empty_line() -> None:
    command = [sys.executable, "-m", "streamserve", "chat", "--max-tokens", "8", "--threads", "1"]
    done = subprocess.run(
        command, input="Hello!\nWhat is 1 + 1?\n\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count("> ") == 3


def test_ctrl_c_ends_an_answer_and_another_one_the_chat(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_position_embeddings=8192)
    command = [sys.executable, "-m", "streamserve", "chat", str(folder), "--threads", "1"]
    command += ["--max-tokens", "8000", "--draft", "none"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write("hello\n")
            process.stdin.flush()
            assert process.stdout.read(2) == "> "
            assert process.stdout.read(5)  # in the middle of a long answer
            process.send_signal(signal.SIGINT)
            while process.stdout.read(1) != "\n":
                pass
        assert process.stdout.read(2) == "> "
        # Python would not notice a signal that arrives between printing the prompt and reading.
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_the_banner_tells_the_memory_of_all_workers() -> None:
    settings = resolve("embedded", {"pairs": 2}, environ={})
    model = SimpleNamespace(weight_bytes=10_000_000)
    ready: Any = SimpleNamespace(model=model, kv_cache_bytes=90_000_000, swap_bytes=0, weights_shared=False)
    assert memory_together(settings, ready) == " in each of 4 workers: 400 MB together"
    ready.weights_shared = True
    assert memory_together(settings, ready) == ", the KV cache in each of 4 workers: 370 MB together"
    assert memory_to_swap(settings, ready) == ""
    ready.swap_bytes = 20_000_000
    assert memory_to_swap(settings, ready) == "\n  swap      up to 20 MB for evicted KV in each of 4 workers"
    assert memory_together(resolve("embedded", environ={}), ready) == ""


def test_more_threads_than_processors_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    usable = usable_processors().threads
    warn_of_threads(resolve("embedded", {"threads": usable}, environ={}))
    assert not caplog.records
    warn_of_threads(resolve("embedded", {"threads": usable, "pairs": 1}, environ={}))
    assert f"{2 * usable} threads together, of which only {usable} run" in caplog.text


def test_a_hub_name_is_served_from_the_hubs_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--tiny"
    make_checkpoint(repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    flags = ["--max-tokens", "4", "--threads", "1"]
    command = [sys.executable, "-m", "streamserve", "generate", "hello", *flags, "--model"]
    cached, missing = (
        subprocess.run([*command, name], capture_output=True, text=True, env=environment, check=False)
        for name in ("owner/tiny", "owner/none")
    )
    assert cached.returncode == 0, cached.stderr
    assert missing.returncode == 2
    assert (
        "owner/none: HF_HUB_OFFLINE forbids access to the hub, and the model is not in the cache"
        in missing.stderr
    )
    assert "Traceback" not in missing.stderr


def test_a_server_with_a_certificate_speaks_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    flags = ["--threads", "1", "--ssl-certfile", str(tmp_path / "pem")]
    with serving(str(make_checkpoint(tmp_path / "model")), *flags) as served:
        assert served.url.startswith("https://127.0.0.1:")
        body = {"model": str(tmp_path / "model"), "prompt": "hello", "max_tokens": 3}
        reply = httpx.post(f"{served.url}/v1/completions", json=body, verify=trusting, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 3
        (command,) = [line.strip() for line in served.banner.splitlines() if "curl" in line]
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.startswith("data: {")
        assert served.end() == 0


def test_a_server_does_not_reveal_its_key(locked: Served) -> None:
    """A server does not reveal its key, neither in the banner nor in the worker's environment."""
    assert KEY not in locked.banner
    assert httpx.get(f"{locked.url}/health").status_code == 200
    assert httpx.get(f"{locked.url}/v1/models").status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 200
    (worker,) = workers_below(locked.process.pid)
    assert {name for name in worker.environ() if name.startswith("STREAMSERVE_")} <= {KERNEL_PATH_VARIABLE}


def test_listening_on_other_interfaces_without_a_key_is_warned_about() -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as all_interfaces,
        socket.create_server(("127.0.0.1", 0)) as loopback,
    ):
        assert not is_loopback(all_interfaces)
        assert is_loopback(loopback)
    command = [sys.executable, "-m", "streamserve", "serve", "--host", "0.0.0.0", "--port", "0"]
    command += ["--log-format", "json", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        process.terminate()
        process.communicate(timeout=30)
    assert line["level"] == "warning"
    assert "--api-key-file" in line["message"]
