"""All models are served from the same table, whether one or several, always loaded or on demand."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from streamserve.api.app import OnDemand, create_app, create_app_on_demand
from streamserve.api.generator import Item
from streamserve.api.settings import ApiSettings
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest
from streamserve.protocol.sampling import SamplingParams
from tests.api.fake_pool import SIZE, FakePool, FakeState
from tests.api.serving import ScriptedGenerator, ScriptedHealth, hello_script

SETTINGS = ApiSettings(admin_key=[digest("admin")])


@dataclass(frozen=True)
class Served:
    """A client of an application with the models a and b; `during` has the pool's users while b answered,
    `generator` is the engine of a."""

    http: httpx.AsyncClient
    pool: FakePool
    during: list[int]
    generator: ScriptedGenerator


@pytest.fixture
def served(generator: ScriptedGenerator) -> Served:
    pool = FakePool({"a": FakeState("loaded", loads=1), "b": FakeState()})
    pool.open.set()
    during: list[int] = []

    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        during.append(pool.users["b"])
        async for item in hello_script(prompt, params):
            yield item

    first = generator.replaced(served_names=("a",), adapters={"poems": Adapter("poems", "/poems", "poems")})
    second = generator.replaced(served_names=("b", "owner/b"), adapters={}, script=script, submitted=[])
    models = {"a": OnDemand(first, SETTINGS, 64), "b": OnDemand(second, SETTINGS, 32)}
    return Served(client_of(create_app_on_demand(models, pool)), pool, during, first)


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://server",
        headers={"Authorization": "Bearer admin"},
    )


async def complete(client: httpx.AsyncClient, model: str | None = None) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 2} | ({"model": model} if model else {})
    return await client.post("/v1/completions", json=body)


async def change(client: httpx.AsyncClient, path: str, **body: str) -> tuple[int, str]:
    reply = await client.post(f"/v1/{path}_lora_adapter", json=body)
    return reply.status_code, reply.text if reply.is_success else reply.json()["error"]["message"]


async def test_a_model_is_kept_loaded_while_it_answers(served: Served) -> None:
    reply = await complete(served.http, "owner/b")
    assert (reply.status_code, reply.json()["model"]) == (200, "owner/b")
    assert (served.during, served.pool.users["b"], served.pool.models["b"].loads) == ([1], 0, 1)
    assert (await complete(served.http)).json()["model"] == "a"


async def test_a_request_that_is_refused_releases_its_model(served: Served) -> None:
    reply = await served.http.post("/v1/completions", json={"model": "b", "prompt": [], "max_tokens": 1})
    assert reply.status_code == 400
    assert served.pool.users["b"] == 0


async def test_unknown_models_are_refused_with_the_names_of_all(served: Served) -> None:
    reply = await complete(served.http, "c")
    expected = "The model 'c' does not exist; this server has: a, poems, b, owner/b"
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, expected)
    for path in ("/v1/models/c", "/v1/router?model=c"):
        assert (await served.http.get(path)).status_code == 404
    assert (await served.http.post("/admin/workers/unified-0/drain?model=b")).status_code == 409


async def test_the_states_of_models_on_demand_are_shown(served: Served) -> None:
    health = (await served.http.get("/health")).json()
    assert health == {"status": "ready", "detail": "ready", "models": {"a": "loaded", "b": "not loaded"}}
    cards = {card["id"]: card for card in (await served.http.get("/v1/models")).json()["data"]}
    assert list(cards) == ["a", "poems", "b", "owner/b"]
    assert (cards["a"]["state"], cards["a"]["memory"], cards["a"]["parent"]) == ("loaded", SIZE, None)
    assert cards["a"]["unloadable"]
    assert (cards["poems"]["state"], cards["poems"]["parent"]) == ("loaded", "a")
    assert not {"memory", "unloadable"} & cards["poems"].keys()
    assert cards["owner/b"]["state"] == "not loaded"
    assert (await served.http.get("/v1/models/owner/b")).json() == cards["owner/b"]
    metrics = (await served.http.get("/metrics")).text
    assert f"streamserve:models_memory_limit_bytes {float(SIZE)}" in metrics
    assert 'streamserve:model_loaded{model_name="b"} 0.0' in metrics
    assert metrics.count("# TYPE streamserve:streams gauge") == 1


async def test_a_model_that_is_always_loaded_has_no_state(generator: ScriptedGenerator) -> None:
    client = client_of(
        create_app(generator.replaced(health_state=ScriptedHealth(detail="as it says")), SETTINGS)
    )
    assert (await client.get("/health")).json() == {"status": "ready", "detail": "as it says"}
    for card in (await client.get("/v1/models")).json()["data"]:
        assert not {"state", "memory", "unloadable"} & card.keys()
        assert (await client.get(f"/v1/models/{card['id']}")).json() == card
    assert "streamserve:model" not in (await client.get("/metrics")).text
    assert (await complete(client, "owner/scripted")).json()["model"] == "owner/scripted"
    reply = await complete(client, "c")
    expected = "The model 'c' does not exist; this server has: scripted, owner/scripted"
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, expected)
    assert (await client.post("/admin/workers/unified-0/drain?model=scripted")).status_code == 200


async def test_a_model_that_is_loading_is_refused(generator: ScriptedGenerator) -> None:
    class Loading(ScriptedGenerator):
        @property
        def model(self) -> Any:
            raise RequestError("the model is loading", status=503)

        @model.setter
        def model(self, value: Any) -> None: ...

    loading = object.__new__(Loading)
    for name, value in vars(generator).items():
        if name != "model":
            object.__setattr__(loading, name, value)
    client = client_of(create_app(loading))
    for path in ("/v1/models", "/v1/models/scripted"):
        assert (await client.get(path)).status_code == 503
    assert (await complete(client)).status_code == 503
    assert (await client.get("/v1/models/c")).status_code == 404


async def test_a_model_is_unloaded_unless_it_is_in_use(served: Served) -> None:
    await complete(served.http, "b")
    served.pool.users["b"] = 1
    assert (await served.http.post("/admin/unload?model=owner/b")).status_code == 409
    assert served.pool.models["b"].state == "loaded"
    served.pool.users["b"] = 0
    for _ in range(2):
        reply = await served.http.post("/admin/unload?model=owner/b")
        assert (reply.status_code, reply.json()) == (200, {"model": "b", "state": "not loaded"})
    assert served.pool.models["b"].state == "not loaded"
    assert served.pool.models["a"].state == "loaded"
    assert (await served.http.post("/admin/unload?model=c")).status_code == 404
    assert (await complete(served.http, "b")).json()["model"] == "b"
    assert served.pool.models["b"].loads == 2


async def test_only_an_admin_key_unloads(served: Served) -> None:
    reply = await served.http.post("/admin/unload", headers={"Authorization": "Bearer other"})
    assert reply.status_code == 401
    models = {"a": OnDemand(served.generator, ApiSettings(), 64)}
    open_to_all = client_of(create_app_on_demand(models, served.pool))
    assert (await open_to_all.post("/admin/unload")).status_code == 403
    (card, *_) = (await open_to_all.get("/v1/models")).json()["data"]
    assert (card["state"], card["unloadable"]) == ("loaded", False)
    assert served.pool.models["a"].state == "loaded"


async def test_a_model_that_is_always_loaded_cannot_be_unloaded(generator: ScriptedGenerator) -> None:
    reply = await client_of(create_app(generator, SETTINGS)).post("/admin/unload")
    assert reply.status_code == 409
    assert "--idle-unload" in reply.json()["error"]["message"]


async def test_draining_refuses_requests_that_wait_for_a_model(served: Served) -> None:
    served.pool.open.clear()
    waiting = asyncio.create_task(complete(served.http, "b"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await served.http.post("/admin/drain")
    reply = await waiting
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        503,
        "the server is draining: it takes no new requests",
    )


async def test_adapters_are_of_a_model(served: Served) -> None:
    load = {"lora_name": "odes", "lora_path": "/odes"}
    required = "model is required, as this server has several models: a, b"
    assert await change(served.http, "load", **load) == (400, required)
    taken = (400, "lora_name: the name 'b' is in use")
    assert await change(served.http, "load", lora_name="b", lora_path="/b", model="a") == taken
    assert (await change(served.http, "load", **load, model="b"))[0] == 200
    absent = "The LoRA adapter 'odes' does not exist"
    status, message = await change(served.http, "unload", lora_name="odes", model="a")
    assert (status, message[: len(absent)]) == (404, absent)
    assert (await change(served.http, "unload", lora_name="odes"))[0] == 200
    status, message = await change(served.http, "unload", lora_name="odes")
    assert (status, message[: len(absent)]) == (404, absent)
    assert served.pool.users["b"] == 0
