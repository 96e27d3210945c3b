"""The server listens on its address, and ends when it receives a signal."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from streamserve.api.app import create_app
from streamserve.api.http.server import BindError, bind, serve
from tests.api.serving import ScriptedGenerator, until

PROGRAM = """
import asyncio, sys
from streamserve.api.app import create_app
from streamserve.api.http.server import bind, serve
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator
from streamserve.text.output import ChoiceDelta, Usage

async def slow(prompt, params):
    for index in range(params.max_tokens):
        await asyncio.sleep(0.05)
        yield ChoiceDelta(0, "x", (72,), finish="length" if index + 1 == params.max_tokens else None)
    yield Usage(len(prompt), params.max_tokens)

async def main():
    bound = bind("127.0.0.1", 0)
    print(bound.getsockname()[1], flush=True)
    generator = ScriptedGenerator(Tokenizer.from_folder(sys.argv[1]), slow)
    await serve(create_app(generator), bound, grace_seconds=int(sys.argv[2]))
    print("cleaned up", flush=True)

asyncio.run(main())
"""


END_OF_SERVICE = (
    'data: {"error":{"message":"the server is shutting down","type":"server_error","param":null,"code":null}}'
    "data: [DONE]"
)


def test_a_port_in_use_is_one_clear_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            BindError, match=f"^port {port} on 127.0.0.1 is already in use: choose another with --port$"
        ):
            bind("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(BindError, match=r"^cannot listen on port 80 of 192\.0\.2\.1: "):
        bind("192.0.2.1", 80)


def test_a_host_that_does_not_exist_is_one_clear_line() -> None:
    with pytest.raises(BindError, match=r"^cannot listen on no such host: "):
        bind("no such host", 80)


def test_a_port_can_be_bound_again_at_once() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pass
    bind("127.0.0.1", port).close()


async def test_cancelling_it_closes_the_door(generator: ScriptedGenerator) -> None:
    bound = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    serving = asyncio.create_task(serve(create_app(generator), bound))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/ping")).status_code == 200
    serving.cancel()
    await asyncio.wait({serving})
    assert serving.cancelled()
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/ping")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tests.text.folders import byte_level_folder

    return byte_level_folder(tmp_path)


@contextmanager
def started(folder: Path, grace: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server in a separate process, which can receive signals."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(grace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"


def assert_clean(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read() == "cleaned up\n"
    assert "Traceback" not in process.stderr.read()


def test_while_it_drains_it_tells_newcomers_and_a_second_signal_ends_it_at_once(folder: Path) -> None:
    """While draining, new requests are refused with an explanation. A second signal ends the server at once,
    although the open request has 30 seconds left."""
    with started(folder, 30) as (process, url):
        body = {"prompt": "hi", "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            refused = httpx.post(f"{url}/v1/completions", json=body)
            assert refused.status_code == 503
            assert 25 <= int(refused.headers["Retry-After"]) <= 30
            assert "draining" in refused.json()["error"]["message"]
            assert next(line for line in lines if line).startswith("data: {")  # the open request continues
            process.send_signal(signal.SIGTERM)
            rest = "".join(lines)
        assert process.wait(timeout=20) == 0
        assert rest.endswith(END_OF_SERVICE)
        assert_clean(process)


def test_a_second_signal_with_nothing_open_logs_no_error(folder: Path) -> None:
    with started(folder, 30) as (process, url):
        assert httpx.get(f"{url}/ping").is_success
        process.send_signal(signal.SIGTERM)
        time.sleep(0.03)  # Two signals that are pending at once count as one; the server polls every 0.1 s.
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == "cleaned up\n"
        assert not process.stderr.read()


@pytest.mark.parametrize(
    ("number", "grace", "complete"), [("SIGTERM", 30, True), ("SIGINT", 30, True), ("SIGTERM", 0, False)]
)
def test_a_signal_ends_it_after_its_requests(folder: Path, number: str, grace: int, complete: bool) -> None:
    """Open requests have the grace period to end, and the caller of `serve` can clean up afterwards."""
    with started(folder, grace) as (process, url):
        body = {"prompt": "hi", "max_tokens": 20, "stream": True}
        text = ""
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            for line in response.iter_lines():
                if not text:
                    process.send_signal(getattr(signal, number))
                text += line
        assert process.wait(timeout=20) == 0
        assert text.endswith("data: [DONE]" if complete else END_OF_SERVICE)
        assert_clean(process)
