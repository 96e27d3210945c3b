"""`streamserve batch` answers a file of requests in order, without a server, and can continue an interrupted
run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamserve.cli.main import app
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale

CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def line(name: str, url: str = CHATS, **body: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **body}
    if url == CHATS:
        body.setdefault("messages", [{"role": "user", "content": f"the {name}"}])
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


REQUESTS = [
    line("fox"),
    line("dog", "/v1/completions", prompt="the quick brown", max_tokens=30),
    line("cat", temperature=200),
    line("owl", "/v1/responses", input="hi", max_output_tokens=3, max_tokens=None),
    *(line(f"bird {number}") for number in range(12)),
]


def write(path: Path, *requests: Any) -> Path:
    path.write_text("".join(f"{json.dumps(request)}\n" for request in requests), encoding="utf-8")
    return path


def run(model: Path, file: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["batch", str(file), "--model", str(model), "--threads", "1", "--num-blocks", "256", *arguments]
    )


def results(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the results of all requests in a single run."""
    file = write(tmp_path_factory.mktemp("whole") / "requests.jsonl", *REQUESTS)
    done = run(model, file)
    assert done.exit_code == 1, done.output
    assert "16 requests were answered: see " in done.output
    assert "1 requests failed" in done.output
    return results(file.with_name("requests.jsonl.results.jsonl"))


def content(result: Any) -> Any:
    """Return a result without its ids and times."""
    body = result["response"]["body"]
    return body.get("choices") or body.get("error") or [item["content"] for item in body["output"]]


def test_results_are_in_the_order_of_the_requests(whole: list[Any]) -> None:
    assert [result["custom_id"] for result in whole] == [request["custom_id"] for request in REQUESTS]
    statuses = [result["response"]["status_code"] for result in whole]
    assert statuses == [200, 200, 400, *[200] * 13]
    assert whole[1]["response"]["body"]["usage"]["completion_tokens"] == 30
    assert whole[2]["response"]["body"]["error"]["param"] == "temperature"
    assert whole[3]["response"]["body"]["object"] == "response"


@pytest.mark.parametrize("cut", [b"", b'{"id": "batch_req_5", "cus'])
def test_an_interrupted_run_goes_on(
    model: Path, whole: list[Any], tmp_path: Path, cut: bytes, scale: Scale
) -> None:
    """An interrupted run continues: existing results stay, and an incomplete line is written again."""
    if not scale.full and not cut:
        pytest.skip("with --full")
    file, output = write(tmp_path / "requests.jsonl", *REQUESTS), tmp_path / "out.jsonl"
    kept = "".join(f"{json.dumps(result)}\n" for result in whole[:5])
    output.write_bytes(kept.encode() + cut)
    done = run(model, file, "-o", str(output))
    assert done.exit_code == 1, done.output
    assert output.read_text().startswith(kept)
    assert [content(result) for result in results(output)] == [content(result) for result in whole]


def test_nothing_is_left_to_do(model: Path, tmp_path: Path) -> None:
    """If no request is left to answer, no model is loaded, and the exit status reflects the results."""
    file = write(tmp_path / "requests.jsonl", line("a"))
    result = {"id": "x", "custom_id": "a", "response": {"status_code": 200, "request_id": "", "body": {}}}
    write(tmp_path / "requests.jsonl.results.jsonl", result)
    assert run(model / "missing", file).exit_code == 2
    done = run(model, file)
    assert done.exit_code == 0
    assert done.output == f"streamserve: all 1 had results: see {file}.results.jsonl\n"


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([line("a"), line("a")], "several requests have the custom_id 'a'"),
        ([line("a"), {"custom_id": "b"}], "line 2: this line is not a request"),
        ([line("a", "/v1/embeddings")], "line 1: url must be"),
    ],
)
def test_files_that_are_refused(model: Path, tmp_path: Path, requests: Any, message: str) -> None:
    file = write(tmp_path / "requests.jsonl", *requests)
    done = run(model, file)
    assert (done.exit_code, message in done.output) == (1, True), done.output
    assert list(tmp_path.iterdir()) == [file]


def test_results_of_other_requests_are_not_touched(model: Path, tmp_path: Path) -> None:
    file, output = write(tmp_path / "requests.jsonl", line("a")), tmp_path / "out.jsonl"
    for text in ('{"id": "x", "custom_id": "b"}\n', "notes\n"):
        output.write_text(text)
        done = run(model, file, "-o", str(output))
        assert done.exit_code == 1
        assert "line 1 is not" in done.output
        assert output.read_text() == text


def test_the_output_is_not_the_input(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "requests.jsonl", line("a"))
    assert run(model, file, "-o", str(file)).exit_code == 2
    assert run(model, tmp_path / "missing.jsonl").exit_code == 2


@pytest.fixture
def nothing(tmp_path: Path) -> Path:
    """A folder of a model whose loading would fail with another message."""
    folder = tmp_path / "no" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_pipes_are_refused_before_the_model_is_loaded(nothing: Path, tmp_path: Path) -> None:
    """A run reads its files several times, so that it would fail after it has computed."""
    file, pipe = write(tmp_path / "requests.jsonl", *REQUESTS[:1]), tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments in ((pipe,), (file, "-o", str(pipe))):
        done = run(nothing, *arguments)
        assert (done.exit_code, done.output) == (
            2,
            f"streamserve: {pipe} is a pipe or a device: batches are continued from files\n",
        )


def test_a_file_that_cannot_be_opened_is_refused_before_the_model_is_loaded(
    nothing: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "requests.jsonl", *REQUESTS[:1])
    target = tmp_path / "nowhere" / "results"
    done = run(nothing, file, "-o", str(target))
    assert (done.exit_code, done.output) == (
        2,
        f"streamserve: {target} cannot be written: No such file or directory\n",
    )
    done = run(nothing, tmp_path / "missing")
    assert (done.exit_code, done.output) == (
        2,
        f"streamserve: {tmp_path / 'missing'} cannot be read: No such file or directory\n",
    )
