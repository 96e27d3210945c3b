"""Files and batches behave as OpenAI's client expects: in order, within limits, and across restarts."""

import asyncio
import json
import os
import resource
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from streamserve.api.generator import Item
from streamserve.api.settings import ApiSettings
from streamserve.extras.batches import service
from streamserve.extras.batches.folder import BatchFolder, FolderError
from streamserve.extras.batches.lines import BATCH_PRIORITY
from streamserve.extras.batches.schemas import FINAL
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.refusing import refused
from tests.api.serving import ScriptedGenerator, Served, scripted, until

CHATS = "/v1/chat/completions"
BODY: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def line(name: str, body: Any = BODY, url: str = CHATS, **fields: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body, **fields}


def lines(*entries: Any) -> bytes:
    texts = (entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)
    return "".join(f"{text}\n" for text in texts).encode()


def upload(server: Served, *entries: Any) -> str:
    file = server.client.files.create(file=("requests.jsonl", lines(*entries)), purpose="batch")
    return file.id


def create(server: Served, *entries: Any, endpoint: Any = CHATS, **fields: Any) -> Any:
    return server.client.batches.create(
        input_file_id=upload(server, *entries), endpoint=endpoint, completion_window="24h", **fields
    )


def ended(server: Served, name: str) -> Any:
    """Return the batch once it has ended."""
    until(lambda: server.client.batches.retrieve(name).status in FINAL)
    return server.client.batches.retrieve(name)


def content(server: Served, name: str | None) -> list[Any]:
    assert name is not None
    return [json.loads(text) for text in server.client.files.content(name).text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


@pytest.fixture
def server(generator: ScriptedGenerator, folder: Path) -> Iterator[Served]:
    with scripted(generator.replaced(submitted=[]), ApiSettings(batch_folder=str(folder))) as running:
        yield running


class Gate:
    """A script that answers the prompts of some requests only after the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waiting = 0

    async def script(self, prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        if params.max_tokens == 9:
            self.waiting += 1
            try:
                while not self.opened.is_set():  # noqa: ASYNC110 (another thread sets it)
                    await asyncio.sleep(0.01)
            finally:
                self.waiting -= 1
        yield ChoiceDelta(0, f"{params.max_tokens}", (72,), finish="stop")
        yield Usage(len(prompt), 1)


SLOW = {**BODY, "max_tokens": 9}


def test_a_file_is_stored_and_deleted(server: Served) -> None:
    data = lines(line("a"))
    file = server.client.files.create(file=("requests.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (
        len(data),
        "requests.jsonl",
        "batch",
        "file",
    )
    assert server.client.files.retrieve(file.id).to_dict() == file.to_dict()
    assert server.client.files.content(file.id).content == data
    assert [each.id for each in server.client.files.list(purpose="batch")] == [file.id]
    assert server.client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        server.client.files.retrieve(file.id)
    assert list(server.client.files.list()) == []


def test_a_batch_answers_each_request_as_its_route_does(server: Served) -> None:
    bad = {**BODY, "temperature": 200}
    batch = create(server, line("a"), line("b", bad), "", line("c"), metadata={"team": "x"})
    assert batch.status in ("validating", "in_progress", "completed")
    assert batch.expires_at - batch.created_at == 86_400
    done = ended(server, batch.id)
    assert (done.status, done.metadata) == ("completed", {"team": "x"})
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    answered, failed = content(server, done.output_file_id), content(server, done.error_file_id)
    assert [result["custom_id"] for result in answered] == ["a", "c"]
    alone = server.post(CHATS, **BODY).json()
    response = answered[0]["response"]
    assert (response["status_code"], answered[0]["error"]) == (200, None)
    assert response["body"]["choices"] == alone["choices"]
    assert response["request_id"].startswith("req-")
    (refusal,) = failed
    assert refusal["response"]["status_code"] == 400
    assert refusal["response"]["body"] == server.post(CHATS, **bad).json()


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "hi", "max_tokens": 4}), ("/v1/responses", {"input": "hi"})],
)
def test_other_routes(server: Served, url: str, body: Any) -> None:
    done = ended(server, create(server, line("a", body, url), endpoint=url).id)
    (result,) = content(server, done.output_file_id)
    assert result["response"]["status_code"] == 200
    assert result["response"]["body"].get("store", False) is False


def test_requests_of_a_batch_come_after_interactive_ones(server: Served) -> None:
    ranked = [
        line("a"),
        line("b", {**BODY, "priority": -5}),
        line("c", {**BODY, "priority": BATCH_PRIORITY + 7}),
    ]
    ended(server, create(server, *ranked).id)
    server.post(CHATS, **BODY)
    priorities = [each.options.priority for each in server.llm.submitted]
    assert sorted(priorities) == [0, BATCH_PRIORITY, BATCH_PRIORITY, BATCH_PRIORITY + 7]


def test_results_are_in_order_and_requests_at_most_so_many_at_once(
    generator: ScriptedGenerator, folder: Path
) -> None:
    running, most = 0, 0

    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02 if params.max_tokens % 2 else 0.001)
        running -= 1
        yield ChoiceDelta(0, "hello", (72,), finish="stop")
        yield Usage(len(prompt), 1)

    settings = ApiSettings(batch_folder=str(folder), batch_concurrency=3)
    with scripted(generator.replaced(script=script), settings) as server:
        names = [f"n{number}" for number in range(40)]
        entries = [line(name, {**BODY, "max_tokens": 1 + i % 7}) for i, name in enumerate(names)]
        done = ended(server, create(server, *entries).id)
        assert [result["custom_id"] for result in content(server, done.output_file_id)] == names
    assert most == 3


def test_a_batch_is_cancelled_with_the_results_that_it_has(
    generator: ScriptedGenerator, folder: Path
) -> None:
    gate = Gate()
    settings = ApiSettings(batch_folder=str(folder))
    with scripted(generator.replaced(script=gate.script), settings) as server:
        batch = create(server, line("a"), line("b", SLOW), line("c"))
        until(lambda: server.client.batches.retrieve(batch.id).request_counts.completed == 1)
        assert refused(server.http.delete(f"/v1/files/{batch.input_file_id}"), 409)["message"]
        done = server.client.batches.cancel(batch.id)
        assert (done.status, gate.waiting) == ("cancelled", 0)
        assert done.cancelling_at is not None
        assert [result["custom_id"] for result in content(server, done.output_file_id)] == ["a"]
        assert done.error_file_id is None
        with pytest.raises(openai.ConflictError, match="it is cancelled"):
            server.client.batches.cancel(batch.id)


def test_a_batch_goes_on_after_a_restart(generator: ScriptedGenerator, folder: Path) -> None:
    """A batch continues after a restart: no request with a result is answered again, and a truncated line is
    written again."""
    gate = Gate()
    settings = ApiSettings(batch_folder=str(folder))
    bad = {**BODY, "top_p": 5}
    with scripted(generator.replaced(script=gate.script), settings) as server:
        batch = create(server, line("a"), line("b", bad), line("c", SLOW), line("d"), metadata={"x": "y"})
        until(lambda: server.client.batches.retrieve(batch.id).request_counts.failed == 1)
    results = [path for path in (folder / "files").glob("*.jsonl") if b'"response"' in path.read_bytes()]
    assert len(results) == 2
    for path in results:
        path.write_bytes(path.read_bytes() + b'{"id": "batch_req_')
    gate.opened.set()
    again = generator.replaced(script=gate.script, submitted=[])
    with scripted(again, settings) as server:
        done = ended(server, batch.id)
        assert (done.status, done.metadata, done.request_counts.completed) == ("completed", {"x": "y"}, 3)
        answered = content(server, done.output_file_id)
        assert [result["custom_id"] for result in answered] == ["a", "c", "d"]
        assert [result["custom_id"] for result in content(server, done.error_file_id)] == ["b"]
        assert len(again.submitted) == 2
    with scripted(again, settings) as server:
        assert server.client.batches.retrieve(batch.id) == done
        assert content(server, done.output_file_id) == answered


def test_a_batch_whose_input_is_gone_fails_with_its_results(
    generator: ScriptedGenerator, folder: Path
) -> None:
    gate = Gate()
    settings = ApiSettings(batch_folder=str(folder))
    with scripted(generator.replaced(script=gate.script), settings) as server:
        batch = create(server, line("a"), line("b", SLOW))
        until(lambda: server.client.batches.retrieve(batch.id).request_counts.completed == 1)
    (folder / "files" / f"{batch.input_file_id}.jsonl").unlink()
    with scripted(generator, settings) as server:
        done = ended(server, batch.id)
        assert (done.status, done.errors.data[0].code) == ("failed", "input_file_missing")
        assert done.input_file_id in done.errors.data[0].message
        assert [result["custom_id"] for result in content(server, done.output_file_id)] == ["a"]


def test_a_batch_waits_while_the_server_drains(generator: ScriptedGenerator, folder: Path) -> None:
    """A batch waits while the server drains: its open requests do not delay the server's end, and are
    answered when the server resumes."""
    gate = Gate()
    admin = {"Authorization": "Bearer admin"}
    settings = ApiSettings(batch_folder=str(folder), admin_key=(digest("admin"),))
    with scripted(generator.replaced(script=gate.script), settings) as server:
        batch = create(server, line("a"), line("b", SLOW))
        until(lambda: gate.waiting == 1)
        server.http.post("/admin/drain", headers=admin)
        until(lambda: gate.waiting == 0)
        gate.opened.set()
        assert server.client.batches.retrieve(batch.id).status == "in_progress"
        server.http.post("/admin/resume", headers=admin)
        assert ended(server, batch.id).request_counts.completed == 2


def test_a_busy_server_is_asked_again(generator: ScriptedGenerator, folder: Path) -> None:
    """A batch retries requests that a busy server refuses. Temporary refusals are not results; permanent
    errors are."""
    seen: list[int] = []

    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        seen.append(params.max_tokens or 0)
        if params.max_tokens == 9 or len(seen) <= 3:
            raise RequestError("busy", status=503 if params.max_tokens == 9 else 429, retry_after=0.0)
        yield ChoiceDelta(0, "hello", (72,), finish="stop")
        yield Usage(len(prompt), 1)

    settings = ApiSettings(batch_folder=str(folder), batch_concurrency=1)
    with scripted(generator.replaced(script=script), settings) as server:
        done = ended(server, create(server, line("a"), line("b", SLOW)).id)
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        (failure,) = content(server, done.error_file_id)
        assert (failure["custom_id"], failure["response"]["status_code"]) == ("b", 503)
    assert seen == [8] * 4 + [9] * 11


def test_a_batch_expires(generator: ScriptedGenerator, folder: Path) -> None:
    gate = Gate()
    settings = ApiSettings(batch_folder=str(folder))
    with scripted(generator.replaced(script=gate.script), settings) as server:
        batch = create(server, line("a"), line("b", SLOW), line("c"))
        until(lambda: server.client.batches.retrieve(batch.id).request_counts.completed == 1)
    record = folder / "batches" / f"{batch.id}.json"
    stored = json.loads(record.read_text())
    stored["batch"]["expires_at"] = int(time.time()) - 1
    record.write_text(json.dumps(stored))
    with scripted(generator.replaced(script=gate.script), settings) as server:
        done = ended(server, batch.id)
        assert done.status == "expired"
        assert done.expired_at is not None
        assert [result["custom_id"] for result in content(server, done.output_file_id)] == ["a"]
        failures = content(server, done.error_file_id)
        assert [(each["custom_id"], each["error"]["code"]) for each in failures] == [
            ("b", "batch_expired"),
            ("c", "batch_expired"),
        ]


@pytest.mark.parametrize(
    ("entries", "number", "param", "message"),
    [
        ([], None, None, "no requests"),
        (["{"], 1, None, "not valid JSON"),
        (["[" * 3000], 1, None, "this line is not"),
        ([line("a"), "5"], 2, None, "this line is not a request"),
        ([{"custom_id": "a", "url": CHATS}], 1, None, "body"),
        ([line("a", body=[])], 1, "body", "body must be an object"),
        ([line("a"), "", line("a")], 3, "custom_id", "an earlier line has the same"),
        ([line("")], 1, "custom_id", "1 to 512"),
        ([line("a", method="GET")], 1, "method", "must be POST"),
        ([line("a", url="/v1/completions")], 1, "url", f"url must be {CHATS}"),
        ([line("a", url="/admin/drain")], 1, "url", f"url must be {CHATS}"),
        ([line(str(number)) for number in range(6)], 6, None, "at most 5 requests"),
        ([line("a", {"messages": "x" * 5000})], 1, None, "longer than 4096 bytes"),
    ],
)
def test_an_input_that_is_invalid_fails(
    generator: ScriptedGenerator,
    folder: Path,
    entries: list[Any],
    number: int | None,
    param: str | None,
    message: str,
) -> None:
    settings = ApiSettings(batch_folder=str(folder), max_batch_requests=5, max_body_bytes=4096)
    submitted: list[Any] = []
    with scripted(generator.replaced(submitted=submitted), settings) as server:
        done = ended(server, create(server, *entries).id)
        assert done.status == "failed"
        (error,) = done.errors.data
        assert (error.line, error.param) == (number, param)
        assert message in error.message
        assert (done.output_file_id, done.error_file_id, submitted) == (None, None, [])


def test_a_stream_is_refused_in_its_line(server: Served) -> None:
    done = ended(server, create(server, line("a", {**BODY, "stream": True})).id)
    (failure,) = content(server, done.error_file_id)
    assert failure["response"]["status_code"] == 400
    assert failure["response"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", 400),
        ({"completion_window": "1h"}, "completion_window", 400),
        ({"input_file_id": "file-1"}, "input_file_id", 404),
        ({"input_file_id": "../lock"}, "input_file_id", 404),
        ({"input_file_id": None}, "input_file_id", 400),
        ({"metadata": {"a": "x" * 513}}, "metadata", 400),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", 400),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after", 400),
    ],
)
def test_refusals_of_batches(server: Served, fields: Any, param: str, status: int) -> None:
    body = {"input_file_id": upload(server, line("a")), "endpoint": CHATS, "completion_window": "24h"}
    assert refused(server.post("/v1/batches", **{**body, **fields}), status)["param"] == param


def test_an_output_is_no_input(server: Served) -> None:
    done = ended(server, create(server, line("a")).id)
    body = {"input_file_id": done.output_file_id, "endpoint": CHATS, "completion_window": "24h"}
    assert "output of a batch" in refused(server.post("/v1/batches", **body))["message"]


@pytest.mark.parametrize(
    ("form", "param", "message"),
    [
        ({"data": {"purpose": "batch"}}, None, "multipart/form-data"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, None, "file is required"),
        ({"files": {"file": b"x"}}, "purpose", "purpose is required: batch"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, "purpose", "not 'fine-tune'"),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[seconds]": "5"}},
            "expires_after[seconds]",
            "not supported",
        ),
        ({"files": {"file": b"x"}, "data": {"purpose": "x" * 2000}}, "purpose", "longer than 1024"),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, "file", "more than one"),
        (
            {"content": b"--x\r\nhm", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            None,
            "the form",
        ),
    ],
)
def test_refusals_of_files(server: Served, folder: Path, form: Any, param: str | None, message: str) -> None:
    if "files" in form and isinstance(form["files"], dict):
        form = {**form, "files": {name: ("f", data) for name, data in form["files"].items()}}
    elif "files" in form:
        form = {**form, "files": [(name, ("f", data)) for name, data in form["files"]]}
    error = refused(server.http.post("/v1/files", **form))
    if param is not None:
        assert error["param"] == param
    assert message in error["message"]
    assert list((folder / "files").iterdir()) == []


def test_files_are_bounded_alone_and_together(generator: ScriptedGenerator, folder: Path) -> None:
    settings = ApiSettings(batch_folder=str(folder), max_batch_file_bytes=1000, max_batch_folder_bytes=2500)
    form: Any = {"data": {"purpose": "batch"}}

    def post(server: Served, size: int) -> httpx.Response:
        return server.http.post("/v1/files", files={"file": ("f", b"x" * size)}, **form)

    with scripted(generator, settings) as server:
        assert "max_batch_file_bytes" in refused(post(server, 1001), 413)["message"]
        assert "max_batch_file_bytes" in refused(post(server, 100_000), 413)["message"]
        names = [post(server, 1000).json()["id"] for _ in range(2)]
        assert "max_batch_folder_bytes" in refused(post(server, 501), 413)["message"]
        assert post(server, 500).status_code == 200
        server.http.delete(f"/v1/files/{names[0]}")
        assert post(server, 1000).status_code == 200
    with scripted(generator, settings) as server:
        assert refused(post(server, 1), 413)
    assert not list(folder.rglob("*.part"))


def test_results_that_do_not_fit_end_the_batch(generator: ScriptedGenerator, folder: Path) -> None:
    settings = ApiSettings(batch_folder=str(folder), max_batch_folder_bytes=2500, batch_concurrency=1)
    with scripted(generator, settings) as server:
        done = ended(server, create(server, *(line(str(number)) for number in range(8))).id)
        assert done.status == "failed"
        assert "max_batch_folder_bytes" in done.errors.data[0].message
        assert len(content(server, done.output_file_id)) == done.request_counts.completed < 8


def test_files_and_batches_belong_to_their_key(generator: ScriptedGenerator, folder: Path) -> None:
    settings = ApiSettings(batch_folder=str(folder), api_key=(digest("one"), digest("two")))
    with scripted(generator, settings) as server:

        def client(key: str) -> openai.OpenAI:
            return server.client.with_options(api_key=key)

        one, two = client("one"), client("two")
        file = one.files.create(file=("f", lines(line("a"))), purpose="batch")
        fields: Any = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        batch = one.batches.create(**fields)
        until(lambda: one.batches.retrieve(batch.id).status == "completed")
        output = one.batches.retrieve(batch.id).output_file_id
        assert output is not None
        calls: list[Callable[[], Any]] = [
            lambda: two.files.retrieve(file.id),
            lambda: two.files.content(output),
            lambda: two.files.delete(file.id),
            lambda: two.batches.retrieve(batch.id),
            lambda: two.batches.cancel(batch.id),
            lambda: two.batches.create(**fields),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
        assert (list(two.files.list()), list(two.batches.list())) == ([], [])
        assert [each.id for each in one.batches.list()] == [batch.id]
        assert {each.id for each in one.files.list()} == {file.id, output}


def test_batches_are_listed_in_pages(server: Served) -> None:
    names = [create(server, line("a")).id for _ in range(3)]
    assert [each.id for each in server.client.batches.list(limit=2)] == names[::-1]
    page = server.client.batches.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)


def test_files_that_go_take_their_batch_with_them(server: Served) -> None:
    done = ended(server, create(server, line("a")).id)
    for name in (done.input_file_id, done.output_file_id):
        server.client.files.delete(name)
    assert list(server.client.batches.list()) == []


def test_without_a_folder_batches_are_disabled(hello: Served) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/batches/batch_1")):
        assert "--batch-folder" in refused(hello.http.request(method, path), 404)["message"]


def test_one_server_at_a_time_uses_a_folder(server: Served, folder: Path) -> None:
    with pytest.raises(FolderError, match="another server uses it"):
        BatchFolder(folder, 1)


def test_only_the_servers_user_can_enter_the_folders_of_prompts_and_answers(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        BatchFolder(tmp_path / "new", 1).close()
    finally:
        os.umask(umask)
    modes = {name: (tmp_path / "new" / name).stat().st_mode & 0o777 for name in ("files", "batches")}
    assert modes == {"files": 0o700, "batches": 0o700}


def test_stored_records_are_as_written(server: Served, folder: Path) -> None:
    """Stored records have this format, because the next version must read the folder."""
    done = ended(server, create(server, line("a")).id)
    record = msgspec.json.decode((folder / "batches" / f"{done.id}.json").read_bytes())
    assert set(record) == {"owner", "batch", "output", "error"}
    assert record["batch"]["status"] == "completed"


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files to `size` bytes, as if the disk were full; a write that crosses the limit is
    truncated."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_batch_waits_while_its_results_cannot_be_written(
    generator: ScriptedGenerator,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.02)
    settings = ApiSettings(batch_folder=str(folder), batch_concurrency=1, max_batch_folder_bytes=20_000)
    with scripted(generator, settings) as server:
        names = [f"n{number}" for number in range(8)]
        file = upload(server, *map(line, names))
        with full_disk(1200):
            batch = server.client.batches.create(input_file_id=file, endpoint=CHATS, completion_window="24h")
            until(lambda: caplog.text.count("cannot be written: File too large") > 2)
            assert server.client.batches.retrieve(batch.id).status == "in_progress"
        done = ended(server, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 8)
        assert [result["custom_id"] for result in content(server, done.output_file_id)] == names
        for name in (done.input_file_id, done.output_file_id):
            server.client.files.delete(name)
        assert store(server, 20_000).status_code == 200  # all bytes are released


def store(server: Served, size: int) -> httpx.Response:
    return server.http.post("/v1/files", files={"file": b"x" * size}, data={"purpose": "batch"})


def test_what_cannot_be_written_is_refused(generator: ScriptedGenerator, folder: Path) -> None:
    settings = ApiSettings(batch_folder=str(folder), max_batch_folder_bytes=20_000)
    with scripted(generator, settings) as server:
        for size in (5000, 10):  # no space for the file, or for its record
            with full_disk(100):
                message = refused(store(server, size), 507)["message"]
            assert message == "the batch folder cannot be written: File too large"
        file = store(server, 20_000).json()["id"]
        with full_disk(100):
            fields = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
            assert refused(server.post("/v1/batches", **fields), 507)
        assert list(server.client.batches.list()) == []
    assert sorted(path.suffix for path in folder.rglob("*.*")) == [".json", ".jsonl"]
