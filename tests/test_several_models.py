"""A server of three models with memory for two loads them on demand, and unloads only models that are not in
use."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from streamserve.protocol.model_memory import MemoryPlan, MemoryRequest, PlannedModel, PlanRefused
from streamserve.settings.resolve import resolve
from streamserve.text.tokenizer import Tokenizer
from streamserve.workers.memory_plan import plan
from tests.checkpoints import make_checkpoint, reference_model
from tests.serving import serving

NAMES = ("a", "b", "c")
PROMPT = "the quick brown fox"
TOKENS = 24
FLAGS = ("--num-blocks", "64", "--threads", "1")


@dataclass(frozen=True)
class Models:
    """The server's models: their folders, their greedy texts, and the bytes of one model."""

    folders: dict[str, Path]
    texts: dict[str, str]
    size: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folders = {
        name: make_checkpoint(tmp_path_factory.mktemp(name), seed=seed, eos_token_id=None)
        for seed, name in enumerate(NAMES)
    }
    planned = memory_of(folders["a"], 1 << 30)
    assert isinstance(planned, MemoryPlan)
    return Models(
        folders, {name: greedy(folder) for name, folder in folders.items()}, planned.models[0].total
    )


def memory_of(folder: Path, budget: int) -> MemoryPlan | PlanRefused:
    config = resolve(str(folder), {"num_blocks": 64, "threads": 1}, environ={}).model
    return plan(MemoryRequest((PlannedModel("a", config, 1),), budget))


def greedy(folder: Path) -> str:
    """Return the reference text: from a server with this model only."""
    import torch

    tokenizer, model = Tokenizer.from_folder(folder), reference_model(folder)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    output = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[httpx.Client]:
    arguments = [f"{name}={folder}" for name, folder in models.folders.items()]
    arguments[0] = f"a,alias={models.folders['a']}"
    memory = ("--models-memory-bytes", str(2 * models.size), "--memory-timeout", "0.3")
    batches = ("--batch-folder", str(models.folders["a"].parent / "batches"))
    with (
        serving(*arguments, *FLAGS, *memory, *batches) as served,
        httpx.Client(base_url=served.url, timeout=120) as client,
    ):
        assert "a, alias: " in served.banner
        yield client


def ask(client: httpx.Client, model: str | None) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body | ({} if model is None else {"model": model}))


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def use(client: httpx.Client, models: Models, *names: str) -> None:
    """Send requests to models one after the other, so that the last ones are loaded, most recently used
    last."""
    for name in names:
        assert text_of(ask(client, name)) == models.texts[name]


def states(client: httpx.Client) -> dict[str, str]:
    listed = client.get("/v1/models").json()["data"]
    cards = {card["id"]: card["state"] for card in listed}
    assert client.get("/health").json()["models"] == {name: cards[name] for name in NAMES}
    return cards


def open_stream(client: httpx.Client, model: str) -> str:
    body = {
        "model": model,
        "template": "{context}",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    reply = client.post("/v1/streams", json=body)
    assert reply.status_code == 200, reply.text
    name: str = reply.json()["id"]
    edit = {"version": 0, "operations": [{"op": "append", "text": PROMPT}]}
    assert client.patch(f"/v1/streams/{name}", json=edit).status_code == 200
    return name


def finish_stream(client: httpx.Client, name: str) -> str:
    lines = client.post(f"/v1/streams/{name}/finish", json={}).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event).get("choices", []))


def test_models_are_loaded_by_name_and_answer_as_alone(server: httpx.Client, models: Models) -> None:
    asked = ["a", "b", "alias", None, "b", "a"]
    with ThreadPoolExecutor(len(asked)) as threads:
        replies = list(threads.map(lambda name: ask(server, name), asked))
    for name, reply in zip(asked, replies, strict=True):
        expected = "b" if name == "b" else "a"
        assert text_of(reply) == models.texts[expected]
        assert reply.json()["model"] == (name or "a")
    assert len(set(models.texts.values())) == len(NAMES)
    assert states(server) == {"a": "loaded", "alias": "loaded", "b": "loaded", "c": "not loaded"}
    assert "row_invariant" not in server.get("/v1/models/c").json()
    unknown = ask(server, "d")
    assert unknown.status_code == 404
    assert "this server has: a, alias, b, c" in unknown.json()["error"]["message"]
    card = server.get("/v1/models/c").json()
    assert (card["memory"], card["max_model_len"]) == (models.size, 512)


def test_other_routes_go_to_the_model_that_they_name(server: httpx.Client, models: Models) -> None:
    use(server, models, "a", "b")
    message = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    for route, body in {
        "/v1/chat/completions": message,
        "/v1/messages": message,
        "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    }.items():
        replies = [server.post(route, json=body | {"model": name, "temperature": 0}) for name in ("a", "b")]
        assert [reply.status_code for reply in replies] == [200, 200]
        assert [reply.json()["model"] for reply in replies] == ["a", "b"]
    assert (
        server.post("/v1/embeddings", json={"model": "b", "input": "x"}).json()["error"]["param"] == "model"
    )
    assert server.get("/v1/router", params={"model": "b"}).status_code == 200
    assert server.get("/v1/router", params={"model": "d"}).status_code == 404
    metrics = server.get("/metrics").text
    assert metrics.count("# TYPE streamserve:generation_tokens_total ") == 1
    for name in ("a", "b"):
        assert f'vllm:generation_tokens_total{{model_name="{name}"}}' in metrics
        assert f'streamserve:model_loaded{{model_name="{name}"}} 1.0' in metrics


def test_no_open_prompt_stream_is_lost_and_the_least_recently_used_model_goes(
    server: httpx.Client, models: Models
) -> None:
    use(server, models, "a", "b")
    assert states(server)["c"] == "not loaded"
    streams = {name: open_stream(server, name) for name in ("a", "b")}
    refused = ask(server, "c")
    assert refused.status_code == 503
    assert refused.headers["Retry-After"] == "5"
    assert "have taken its memory for 0.3 seconds: a, b" in refused.json()["error"]["message"]
    for name, stream in streams.items():
        assert finish_stream(server, stream) == models.texts[name]
    assert text_of(ask(server, "c")) == models.texts["c"]
    assert states(server) == {"a": "not loaded", "alias": "not loaded", "b": "loaded", "c": "loaded"}


def test_a_batch_waits_for_its_models_and_loses_no_request(server: httpx.Client, models: Models) -> None:
    """A batch waits for its models and loses no request. It needs all models, of which two fit, so an idle
    one is unloaded in between."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    wanted = ["b", "c", "alias"]
    lines = [
        json.dumps(
            {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body | {"model": name}}
        )
        for name in wanted
    ]
    file = server.post(
        "/v1/files", files={"file": ("batch.jsonl", "\n".join(lines))}, data={"purpose": "batch"}
    ).json()
    use(server, models, "c", "b")
    assert states(server)["a"] == "not loaded"
    stream = open_stream(server, "b")
    batch = server.post(
        "/v1/batches",
        json={
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
    ).json()
    while (batch := server.get(f"/v1/batches/{batch['id']}").json())["status"] != "completed":
        assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    content = server.get(f"/v1/files/{batch['output_file_id']}/content").text
    results = [json.loads(line) for line in content.splitlines()]
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in results}
    assert texts == {"b": models.texts["b"], "c": models.texts["c"], "alias": models.texts["a"]}
    assert finish_stream(server, stream) == models.texts["b"]
    assert states(server)["a"] == "loaded"


def test_a_budget_that_a_model_does_not_fit_is_refused_at_the_start(models: Models) -> None:
    refused = memory_of(models.folders["a"], models.size // 2)
    assert isinstance(refused, PlanRefused)
    assert refused.error.startswith("a: --num-blocks 64 makes a KV pool of 64 blocks")
    assert refused.error.endswith("(--models-memory-bytes)")


def test_the_refusal_is_one_line_and_exit_status_2(models: Models) -> None:
    command = [sys.executable, "-m", "streamserve", "serve", f"x={models.folders['a']}", "--port", "0"]
    done = subprocess.run(
        [*command, "--models-memory-bytes", "100kB"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("streamserve: x: the weights need ")
    assert done.stderr.count("\n") == 1
