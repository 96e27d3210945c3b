"""Two models with LoRA adapters share memory for one model; an unloaded model keeps its adapters."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamserve.execution.loading.load import load as load_model
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.model_memory import MemoryPlan, MemoryRequest, PlannedModel
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.tokenizer import Tokenizer
from streamserve.workers.memory_plan import plan
from tests.adapters import merge, write_adapter
from tests.checkpoints import make_checkpoint
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Task, run_alone
from tests.serving import serving

ADMIN = {"Authorization": "Bearer admin-key"}
PROMPT = "the quick brown fox jumps over the lazy dog and then the other one too"
TOKENS = 16
LIMITS = {"num_blocks": 64, "threads": 1, "max_loras": 2, "max_lora_rank": 4}


@dataclass(frozen=True)
class Prepared:
    """The folders of models and adapters, and the greedy texts of merged weights, by model and adapter."""

    models: dict[str, Path]
    adapters: dict[str, Path]
    texts: dict[str, str]
    size: int


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("several")
    models = {
        name: make_checkpoint(folder / name, seed=seed, eos_token_id=None)
        for seed, name in enumerate(("a", "b"))
    }
    adapters = {
        name: write_adapter(folder / name, models[model], rank=4, seed=seed)
        for seed, (name, model) in enumerate({"first": "a", "second": "a", "other": "b"}.items())
    }
    texts = {name: text_of_weights(model) for name, model in models.items()}
    for name, model in {"first": "a", "second": "a", "other": "b"}.items():
        texts[name] = text_of_weights(merge(models[model], adapters[name], folder / f"merged-{name}"))
    assert len(set(texts.values())) == 5
    config = resolve(str(models["a"]), LIMITS, environ={}).model
    planned = plan(MemoryRequest((PlannedModel("a", config, 1),), 1 << 30))
    assert isinstance(planned, MemoryPlan)
    assert planned.models[0].adapters > 0
    return Prepared(models, adapters, texts, planned.models[0].total)


def text_of_weights(folder: Path) -> str:
    config = ModelConfig(
        path=str(folder), threads=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, draft="none"
    )
    tokenizer = Tokenizer.from_folder(folder)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return tokenizer.decode(
        run_alone(load_model(config).executor, Task(tokenizer.encode(PROMPT), params), TOKENS)
    )


@pytest.fixture(scope="module")
def server(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("settings") / "settings.toml"
    limits = "".join(f"{name} = {value}\n" for name, value in LIMITS.items())
    file.write_text(
        f'models_memory_bytes = {prepared.size}\nadmin_key = ["admin-key"]\nprofile = false\n{limits}'
        f'[models.a]\nmodel = "{prepared.models["a"]}"\nlora = ["first={prepared.adapters["first"]}"]\n'
        f'[models.b]\nmodel = "{prepared.models["b"]}"\n'
    )
    with (
        serving("--config", str(file)) as served,
        httpx.Client(base_url=served.url, timeout=120) as client,
    ):
        assert "adapters: first" in served.banner
        yield client


def ask(server: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", json=body)


def text_of(server: httpx.Client, model: str) -> str:
    reply = ask(server, model)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    text: str = reply.json()["choices"][0]["text"]
    return text


def cards(server: httpx.Client) -> dict[str, Any]:
    return {card["id"]: card for card in server.get("/v1/models").json()["data"]}


def states(server: httpx.Client) -> dict[str, str]:
    return {name: card["state"] for name, card in cards(server).items()}


def change(server: httpx.Client, what: str, **body: str) -> tuple[int, str]:
    reply = server.post(f"/v1/{what}_lora_adapter", json=body, headers=ADMIN)
    message = reply.text if reply.status_code == 200 else reply.json()["error"]["message"]
    return reply.status_code, message


def a_model_that_was_unloaded_has_its_adapters_again(server: httpx.Client, prepared: Prepared) -> None:
    for name in ("a", "first", "b", "first", "b"):
        assert text_of(server, name) == prepared.texts[name]
    expected = {"a": "not loaded", "first": "not loaded", "b": "loaded"}
    assert expected.items() <= states(server).items(), "other tests load further adapters"
    listed = cards(server)
    assert {name: listed[name]["parent"] for name in expected} == {"a": None, "first": "a", "b": None}
    assert listed["first"]["root"] == str(prepared.adapters["first"])
    assert "memory" not in listed["first"]
    assert server.get("/v1/models/first").json() == listed["first"]
    metrics = server.get("/metrics").text
    assert 'streamserve:model_loads_total{model_name="a"} 2.0' in metrics
    assert "this server has: a, first, b" in ask(server, "third").json()["error"]["message"]


def adapters_are_loaded_for_the_model_that_is_named(server: httpx.Client, prepared: Prepared) -> None:
    assert text_of(server, "b") == prepared.texts["b"]
    paths = {name: str(path) for name, path in prepared.adapters.items()}
    refused = change(server, "load", lora_name="second", lora_path=paths["second"])
    assert refused == (400, "model is required, as this server has several models: a, b")
    for taken in ("a", "b", "first"):
        refused = change(server, "load", lora_name=taken, lora_path=paths["second"], model="a")
        assert refused == (400, f"lora_name: the name '{taken}' is in use")
    assert change(server, "load", lora_name="x", lora_path=paths["second"], model="c")[0] == 404
    assert change(server, "load", lora_name="second", lora_path=paths["second"], model="a")[0] == 200
    assert states(server) == {"a": "loaded", "first": "loaded", "second": "loaded", "b": "not loaded"}
    assert change(server, "load", lora_name="third", lora_path=paths["second"] + "x", model="a")[0] == 404
    assert change(server, "load", lora_name="other", lora_path=paths["other"], model="b")[0] == 200
    for name in ("other", "second", "b", "first", "other"):
        assert text_of(server, name) == prepared.texts[name]
    assert cards(server)["other"]["parent"] == "b"


def adapters_are_unloaded_without_their_model(server: httpx.Client, prepared: Prepared) -> None:
    assert text_of(server, "other") == prepared.texts["other"]
    assert states(server)["a"] == "not loaded"
    assert change(server, "unload", lora_name="second", model="b")[0] == 404
    assert change(server, "unload", lora_name="a")[0] == 404
    assert change(server, "unload", lora_name="second")[0] == 200
    assert states(server) == {"a": "not loaded", "first": "not loaded", "b": "loaded", "other": "loaded"}
    assert ask(server, "second").status_code == 404
    assert text_of(server, "first") == prepared.texts["first"]
    path = str(prepared.adapters["second"])
    assert change(server, "load", lora_name="second", lora_path=path, model="a")[0] == 200
    assert text_of(server, "second") == prepared.texts["second"]
    assert change(server, "unload", lora_name="second", model="a")[0] == 200
    assert change(server, "unload", lora_name="other")[0] == 200


def a_model_is_loaded_without_an_adapter_whose_files_have_changed(
    server: httpx.Client, prepared: Prepared
) -> None:
    assert text_of(server, "first") == prepared.texts["first"]
    assert text_of(server, "b") == prepared.texts["b"]
    assert states(server)["first"] == "not loaded"
    with (prepared.adapters["first"] / "adapter_model.safetensors").open("ab") as file:
        file.write(b" ")
    assert text_of(server, "a") == prepared.texts["a"]
    refused = ask(server, "first")
    assert refused.status_code == 503, refused.text
    assert "adapter" in refused.json()["error"]["message"]


def test_adapters_of_several_models(server: httpx.Client, prepared: Prepared) -> None:
    """Adapters of several models on one server: each step continues from the state of the step before."""
    for step in (
        a_model_that_was_unloaded_has_its_adapters_again,
        adapters_are_loaded_for_the_model_that_is_named,
        adapters_are_unloaded_without_their_model,
        a_model_is_loaded_without_an_adapter_whose_files_have_changed,
    ):
        step(server, prepared)
