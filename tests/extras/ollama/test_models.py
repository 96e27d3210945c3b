"""GET /api/tags, /api/ps and /api/version, and POST /api/show."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import msgspec
import pytest

from streamserve.api.app import OnDemand, create_app_on_demand
from streamserve.api.settings import ApiSettings
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.extras.ollama.models import API_VERSION, _count, _details
from streamserve.protocol.adapters import Adapter
from tests.api.fake_pool import SIZE, FakePool, FakeState
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import TEMPLATE, says
from tests.extras.ollama.asking import ask, refusal, talker

SAMPLING = {"temperature": 0.7, "top_k": 20}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ScriptedGenerator:
    made = talker(tmp_path_factory.mktemp("talker"), says("hello"))
    model = msgspec.structs.replace(made.model, parameters=7_300_000, hidden_size=64, dtype="bfloat16")
    names, adapters = ("small", "owner/small:7b"), {"poems": Adapter("poems", "/poems", "abc")}
    return made.replaced(served_names=names, adapters=adapters, model=model)


@pytest.fixture(scope="module")
def server(small: ScriptedGenerator) -> Iterator[Served]:
    with scripted(small, ApiSettings(default_sampling=SAMPLING)) as running:
        yield running


def test_tags_are_all_names(server: Served) -> None:
    models = server.http.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["small:latest", "owner/small:7b", "poems:latest"]
    first, _, adapter = models
    assert first["model"] == first["name"]
    assert (first["size"], first["digest"]) == (4, "0123456789abcdef")
    assert datetime.fromisoformat(first["modified_at"]).timestamp() == server.llm.created
    assert first["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "7.3M",
        "quantization_level": "BF16",
    }
    assert (adapter["details"]["parent_model"], adapter["digest"]) == ("small", "abc")
    for model in models:
        assert ask(server, "/api/chat", model=model["name"], messages=[{"role": "user", "content": "a"}])


def test_loaded_models_have_a_context(server: Served) -> None:
    first, *_ = server.http.get("/api/ps").json()["models"]
    assert (first["name"], first["context_length"], first["size_vram"]) == ("small:latest", 4096, 0)
    assert "expires_at" not in first


def test_a_description(server: Served) -> None:
    reply = ask(server, "/api/show", model="small")
    assert reply["template"] == TEMPLATE
    assert reply["capabilities"] == ["completion", "tools", "thinking"]
    assert reply["parameters"].splitlines() == ["temperature 0.7", "top_k 20"]
    assert reply["modelfile"] == "FROM owner/scripted\n"
    assert reply["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 7_300_000,
        "llama.context_length": 4096,
        "llama.embedding_length": 64,
        "llama.vocab_size": 320,
    }
    assert ask(server, "/api/show", name="small:latest")["details"] == reply["details"]
    assert "The model 'big' does not exist" in refusal(server, "/api/show", 404, model="big")


def test_a_template_without_tools_and_another_task(hello: Served, small: ScriptedGenerator) -> None:
    assert ask(hello, "/api/show", model="scripted")["capabilities"] == ["completion"]
    embedder = small.replaced(task="embed", embedding=EmbeddingConfig())
    with scripted(embedder) as server:
        assert ask(server, "/api/show", model="small")["capabilities"] == ["embedding"]


def test_the_version_is_at_least_what_clients_need(server: Served) -> None:
    reply = server.http.get("/api/version").json()
    assert reply["version"] == API_VERSION
    assert tuple(map(int, API_VERSION.split("."))) >= (0, 6, 4)
    assert reply["server"].startswith("streamserve ")


async def test_models_on_demand_are_listed_without_being_loaded(small: ScriptedGenerator) -> None:
    pool = FakePool({"a": FakeState("loaded", loads=1), "b": FakeState()})
    named = {name: small.replaced(served_names=(name,), adapters={}) for name in "ab"}
    models: Any = {name: OnDemand(llm, ApiSettings(), 64) for name, llm in named.items()}
    transport = httpx.ASGITransport(app=create_app_on_demand(models, pool))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        tags = (await http.get("/api/tags")).json()["models"]
        running = (await http.get("/api/ps")).json()["models"]
        shown = (await http.post("/api/show", json={"model": "b"})).json()
        assert [(model["name"], model["size"]) for model in tags] == [("a:latest", SIZE), ("b:latest", SIZE)]
        assert [model["details"]["family"] for model in tags] == ["llama", ""]
        assert [model["name"] for model in running] == ["a:latest"]
        assert shown["model_info"] == {"general.context_length": 64}
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert pool.models["b"].state == "not loaded"
        pool.open.set()
        loaded = (await http.post("/api/chat", json={"model": "b"})).json()
        assert (loaded["done_reason"], pool.models["b"].state) == ("load", "loaded")


@pytest.mark.parametrize(
    ("number", "text"), [(512, "512"), (134_500, "134.5K"), (7_300_000, "7.3M"), (8_030_000_000, "8.0B")]
)
def test_numbers_of_parameters(number: int, text: str) -> None:
    assert _count(number) == text


@pytest.mark.parametrize(
    ("root", "format"),
    [
        ("/models/small", "safetensors"),
        ("owner/model", "safetensors"),
        ("owner/model-GGUF:Q8_0", "gguf"),
        ("/models/small.gguf", "gguf"),
    ],
)
def test_formats(small: ScriptedGenerator, root: str, format: str) -> None:
    assert _details(small.replaced(root=root), "small", None).format == format
