"""A real server without free files, memory or disk space serves or refuses with a reason, and recovers
afterwards."""

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.campaigns.outcome import TrialFailure
from tests.campaigns.real_server import PROBE, RealServer
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.exhaustion.limits import Clock, can_mount, fill, limit_open_files, memory_limit, small_folder
from tests.processes import workers_below

FLAGS = ("--threads", "1", "--num-blocks", "200")
FILES = 256
HOUR = 3600
RECOVERY_SECONDS = 60.0
MIB = 1 << 20

NEEDS_MOUNT = pytest.mark.skipif(not can_mount(), reason="mounting file systems needs more rights")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="the clock needs a C compiler"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("exhaustion")))


@pytest.fixture
def full(scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full")


@contextmanager
def serving(checkpoint: str, *flags: str, **options: Any) -> Iterator[RealServer]:
    """A server that answers its probe. It must end by SIGTERM."""
    server = RealServer(checkpoint, *FLAGS, *flags, **options)
    server.start()
    try:
        server.probe()
        yield server
        assert server.process.poll() is None, server.log()[-2000:]
    finally:
        server.end()


def until_ready(server: RealServer) -> float:
    """Wait until the probe is answered as before; return the seconds that it took."""
    began = time.monotonic()
    while (failure := _failure(server.probe)) is not None:
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}"
        assert time.monotonic() - began < RECOVERY_SECONDS, (failure, server.log()[-2000:])
        time.sleep(0.2)
    return time.monotonic() - began


def serves_or_exits(server: RealServer) -> bool:
    """Start a server: it must serve, or exit with a status and an error message. Return whether it serves."""
    try:
        failure = _failure(server.start) or _failure(server.probe)
    finally:
        server.end()
    if failure is None:
        return True
    assert failure.kind == "death", failure
    assert server.process.returncode in (1, 2), failure
    assert "Traceback" not in failure.detail, failure
    return False


def _failure(check: Callable[[], object]) -> TrialFailure | None:
    try:
        check()
    except TrialFailure as failure:
        return failure
    return None


def kill_worker(server: RealServer) -> None:
    """Kill a worker."""
    worker = workers_below(server.process.pid)[0]
    os.kill(worker.pid, signal.SIGKILL)


def connections(server: RealServer, count: int, stack: ExitStack) -> int:
    """Open this number of connections that send nothing; return how many could be opened."""
    opened = 0
    for _ in range(count):
        try:
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=1))
        except OSError:
            break
        opened += 1
    return opened


@pytest.mark.usefixtures("full")
def test_more_connections_than_files(checkpoint: str, record: Callable[..., None]) -> None:
    with serving(checkpoint, before=limit_open_files(FILES)) as server:
        with ExitStack() as stack:
            opened = connections(server, 2 * FILES, stack)
            answered: dict[int, int] = {}
            for _ in range(5):
                try:
                    reply = httpx.post(f"{server.url}/v1/completions", json=PROBE, timeout=3)
                    answered[reply.status_code] = answered.get(reply.status_code, 0) + 1
                    assert reply.status_code in (200, 429, 503), reply.text
                except httpx.TransportError:
                    answered[0] = answered.get(0, 0) + 1
        seconds = until_ready(server)
        record(connections=opened, statuses=answered, ready_again_seconds=round(seconds, 2))
        assert len(server.log()) < MIB, "the log is not flooded"


@pytest.mark.usefixtures("full")
def test_a_worker_that_dies_while_there_are_no_files_is_restarted(
    checkpoint: str, record: Callable[..., None]
) -> None:
    """A worker that dies while no files are free is restarted after connections are closed, since its process
    cannot start before."""
    with serving(checkpoint, before=limit_open_files(FILES)) as server:
        with ExitStack() as stack:
            opened = connections(server, 2 * FILES, stack)
            time.sleep(0.5)
            kill_worker(server)
            time.sleep(3)
        seconds = until_ready(server)
        record(connections=opened, ready_again_seconds=round(seconds, 2))


UPGRADE = (
    b"GET /v1/streams/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
UPLOAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    b"Content-Length: 100000\r\n\r\n"
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc'
)


def open_files(server: RealServer) -> int:
    """Return the descriptors that the API process has open."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def is_refused(client: socket.socket, request: bytes) -> bool:
    """Send a request whose body is incomplete, or open a WebSocket; return whether it is refused."""
    try:
        client.sendall(request)
        return request is UPGRADE and b" 101 " not in client.recv(100)
    except ConnectionError:  # refused before the request had been read
        return True


def test_uploads_and_sockets_leave_files_for_a_worker(checkpoint: str, tmp_path: Path) -> None:
    """Uploads and WebSockets leave files for a worker: clients open all connections that they can, each with
    an unfinished upload or a WebSocket. A worker that then dies is replaced while they stay open."""
    folder = ("--batch-folder", str(tmp_path))
    with serving(checkpoint, *folder, before=limit_open_files(FILES)) as server, ExitStack() as stack:
        refused = 0
        for number in range(FILES):
            client = stack.enter_context(server.connect())
            refused += is_refused(client, UPLOAD if number % 2 else UPGRADE)
        assert refused, "the clients did not reach the limit"
        assert list(tmp_path.glob("files/*.part")), "no upload has a file"
        before = set(workers_below(server.process.pid))
        assert open_files(server) < FILES - 32
        kill_worker(server)
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not set(workers_below(server.process.pid)) - before:
            assert time.monotonic() < deadline, server.log()[-2000:]
            time.sleep(0.2)
        stack.close()
        until_ready(server)
        assert "could not be started" not in server.log()


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("files", [24, 40, 64])
def test_too_few_files_to_start_are_reported(checkpoint: str, files: int) -> None:
    """With too few files, a start fails with a report, or the server serves; it must not wait forever for a
    worker that cannot start."""
    serves_or_exits(RealServer(checkpoint, *FLAGS, before=limit_open_files(files)))


@pytest.mark.usefixtures("full")
def test_two_gigabytes_of_memory(checkpoint: str, record: Callable[..., None]) -> None:
    """Concurrent large bodies are refused or answered within two gigabytes of memory."""
    body = b'{"prompt": "a", "x": [' + b"{}," * (2 * MIB) + b"{}]}"  # within max_body_bytes
    with memory_limit(2 << 30) as (kind, before), serving(checkpoint, before=before) as server:
        statuses: list[int] = []

        def post() -> None:
            try:
                reply = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
                statuses.append(reply.status_code)
            except httpx.TransportError:
                statuses.append(0)

        threads = [threading.Thread(target=post) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = until_ready(server)
        record(
            limit=kind,
            statuses=sorted(statuses),
            api_peak_mb=round(server.peak_megabytes()),
            ready_again_seconds=round(seconds, 2),
        )
        assert all(status in (0, 400, 413, 429, 503) for status in statuses), statuses


@NEEDS_MOUNT
@pytest.mark.usefixtures("full")
def test_a_temporary_folder_that_fills(checkpoint: str, record: Callable[..., None]) -> None:
    """With a full temporary folder, requests are served, also with grammars; a worker that dies is restarted,
    at the latest when space is free again."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"prefix": small_folder(folder, 256), "environment": {"TMPDIR": folder}}
        with serving(checkpoint, "--pairs", "1", **options) as server:
            filler = fill(server.process.pid, folder)
            server.probe()
            guided = {**PROBE, "guided_regex": "[0-9]{3}", "ignore_eos": False}
            assert httpx.post(f"{server.url}/v1/completions", json=guided, timeout=30).status_code == 200
            kill_worker(server)
            time.sleep(2)
            filler.unlink()
            record(ready_again_seconds=round(until_ready(server), 2))


@NEEDS_MOUNT
@pytest.mark.usefixtures("full")
def test_a_full_temporary_folder_at_start_is_reported(checkpoint: str) -> None:
    """A full temporary folder at the start is reported, or another folder is used, as Python does."""
    with tempfile.TemporaryDirectory() as folder:
        mount = 'mount -t tmpfs -o size=4k,nr_inodes=1 tmpfs "$0" && exec "$@"'
        prefix = ["unshare", "-m", "sh", "-c", mount, folder]
        server = RealServer(checkpoint, *FLAGS, prefix=prefix, environment={"TMPDIR": folder})
        serves_or_exits(server)


@NEEDS_MOUNT
@pytest.mark.usefixtures("full")
def test_too_little_shared_memory(checkpoint: str) -> None:
    """Little shared memory is enough: KV between workers is in anonymous memory, which does not count against
    /dev/shm."""
    server = RealServer(checkpoint, *FLAGS, "--pairs", "1", prefix=small_folder("/dev/shm", 64))
    assert serves_or_exits(server)


@pytest.mark.usefixtures("full")
def test_a_timeline_that_cannot_be_written_is_reported_at_start(checkpoint: str) -> None:
    assert not serves_or_exits(RealServer(checkpoint, *FLAGS, "--timeline", "/dev/full"))


@NEEDS_MOUNT
@pytest.mark.usefixtures("full")  # tests/fleet/test_launching.py tests this without a disk.
def test_a_disk_that_fills_only_ends_the_timeline(checkpoint: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        timeline = f"{folder}/timeline.json"
        with serving(checkpoint, "--timeline", timeline, prefix=small_folder(folder, 64)) as server:
            fill(server.process.pid, folder)
            for _ in range(3):
                reply = httpx.post(f"{server.url}/v1/completions", json=PROBE, timeout=10)
                assert reply.status_code == 200, reply.text
            assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200


@NEEDS_COMPILER
@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_wall_clock_that_jumps(checkpoint: str, jump: int, tmp_path: Path) -> None:
    """When the wall clock jumps, no request, prompt stream or worker is lost. The times in replies show that
    the clock jumped."""
    clock = Clock(tmp_path)
    flags = ("--stream-ttl", "60", "--request-timeout", "120", "--stuck-after", "10")
    with serving(checkpoint, *flags, environment=clock.environment) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {**PROBE, "max_tokens": 300, "stream": True}
            created = client.post("/v1/streams", json={"query": "so?", "max_tokens": 4}).json()
            before = client.post("/v1/completions", json=PROBE).json()["created"]
            with client.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                clock.jump(jump)
                assert [line for line in lines if line][-1] == "data: [DONE]"
            after = client.post("/v1/completions", json=PROBE).json()["created"]
            assert abs(after - before - jump) < HOUR / 2, "the clock jumped"
            time.sleep(2)
            assert client.get("/health").status_code == 200
            assert client.get(f"/v1/streams/{created['id']}").status_code == 200
            clock.jump(0)
            assert client.post(f"/v1/streams/{created['id']}/finish", json={}).status_code == 200
        server.probe()
        server.check()
