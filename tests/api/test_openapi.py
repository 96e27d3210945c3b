"""The OpenAPI document describes the inputs and outputs of every route, and a page shows it."""

from typing import Any

import jsonschema
import pytest

from streamserve.api.openai.chat import CHAT_ROUTES
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.ops.openapi import component_schemas
from streamserve.api.routes import Operation
from streamserve.extras.web_page.docs import GROUPS
from tests.api.routes import OF_VECTORS
from tests.api.serving import Served

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "logprobs": 1, "echo": True, "return_token_ids": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 8},
    ),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    ("/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": False,
            "logprobs": True,
            "options": {"num_predict": 8},
        },
    ),
    ("/api/generate", {"prompt": "hi", "stream": False, "options": {"num_predict": 8}}),
    ("/api/show", {"model": "tiny"}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [70]}),
]
BROWSER_PATHS = [
    "/v1/models",
    "/v1/models/tiny",
    "/health",
    "/version",
    "/load",
    "/api/tags",
    "/api/ps",
    "/api/version",
]


@pytest.fixture(scope="module")
def description(server: Served) -> Any:
    return server.http.get("/openapi.json").json()


def validate(value: Any, schema: dict[str, Any]) -> None:
    """Validate a value against a schema that has been checked. (`jsonschema.validate` would check the schema
    each time.)"""
    jsonschema.validators.validator_for(schema)(schema).validate(value)


def schema_of(description: Any, content: Any) -> dict[str, Any]:
    """Return a content's schema with all referenced schemas."""
    return {**content["application/json"]["schema"], "components": description["components"]}


def test_every_route_tells_what_it_takes_and_answers(description: Any) -> None:
    """Every reference is defined, and every example is valid for its schema."""
    for path, operations in description["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert "422" not in operation["responses"], path
            assert {"200", "405"} <= set(operation["responses"]), path
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]
                example = content["application/json"]["examples"]["request"]["value"]
                validate(example, schema_of(description, content))
                unavailable = "529" if path.startswith("/v1/messages") else "503"
                statuses = set(operation["responses"])
                assert {"400", "413", "429", unavailable} <= statuses, path
                assert statuses.isdisjoint({"503", "529"} - {unavailable}), path


def test_the_examples_work(server: Served, description: Any) -> None:
    for path, operations in description["paths"].items():
        if "requestBody" in operations.get("post", {}):
            example = operations["post"]["requestBody"]["content"]["application/json"]["examples"]["request"]
            if path in OF_VECTORS:
                assert "--task" in server.post(path, **example["value"]).text
                continue  # needs a model: tests/extras/pooling/test_embeddings.py
            if path in ("/v1/streams/{name}/answer", "/v1/batches"):
                continue  # does not end before the prompt is finished; or needs a file: test_batches.py
            if path.endswith("_lora_adapter"):
                continue  # needs an adapter: tests/test_lora.py
            if path == "/admin/workers":
                continue  # needs an admin key: tests/api/test_drain.py
            if "{name}" in path:
                made = server.post("/v1/streams", query="hello", max_tokens=2).json()
                path = path.replace("{name}", made["id"])
            reply = server.post(path, **example["value"])
            assert reply.status_code == 200, path
            if path == "/v1/streams":
                server.http.delete(f"{path}/{reply.json()['id']}")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_replies_are_as_described(server: Served, description: Any, path: str, body: dict[str, Any]) -> None:
    operation = description["paths"][path]["post"]
    validate(body, schema_of(description, operation["requestBody"]["content"]))
    for sent, status in ((body, 200), ({**body, "model": 5}, 400), ({**body, "model": "gpt-4"}, 404)):
        response = server.post(path, **sent)
        assert response.status_code == status
        schema = schema_of(description, operation["responses"][str(status)]["content"])
        validate(response.json(), schema)


@pytest.mark.parametrize("path", BROWSER_PATHS)
def test_pages_are_as_described(server: Served, description: Any, path: str) -> None:
    known = description["paths"].get(path) or description["paths"]["/v1/models/{name}"]
    schema = schema_of(description, known["get"]["responses"]["200"]["content"])
    validate(server.http.get(path).json(), schema)


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"messages": [{}], "temperature": None, "stream": None}, True),
        ({"messages": [{}], "audio": None, "modalities": ["text"]}, True),
        ({"messages": [{}], "modalities": ["audio"]}, False),
        ({"messages": None}, False),
        ({"messages": [{}], "n": 0}, False),
        ({"messages": [{}], "mood": "glad"}, True),
        ({"messages": [{}], "stream_options": {"include_usage": None}}, False),
    ],
)
def test_schemas_say_what_is_taken(description: Any, body: dict[str, Any], valid: bool) -> None:
    """A null value means that the field is left out. Fields that cannot have an effect accept only values
    without effect."""
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": description["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == valid


def test_strict_fields_are_described_too() -> None:
    operation = CHAT_ROUTES[0].operation
    assert operation is not None
    for strict, body in ((False, {"mood": "glad"}), (False, {"store": True}), (True, {"store": False})):
        schemas = component_schemas(operation, strict)
        schema = {"$ref": "#/components/schemas/ChatRequest", "components": {"schemas": schemas}}
        assert jsonschema.Draft202012Validator(schema).is_valid({"messages": [{}], **body})
    for body in ({"mood": "glad"}, {"store": True}):
        assert not jsonschema.Draft202012Validator(schema).is_valid({"messages": [{}], **body})


def test_errors_are_described_where_they_can_occur(description: Any) -> None:
    assert set(description["paths"]["/health"]["get"]["responses"]) == {"200", "403", "405", "500", "503"}
    assert "400" in description["paths"]["/v1/router"]["get"]["responses"]  # for unknown query parameters
    assert description["paths"]["/health"]["get"]["security"] == []
    assert description["security"] == [{"key": []}, {}]


def test_answers_that_are_no_json(description: Any) -> None:
    answers = {
        path: description["paths"][path]["get"]["responses"]["200"] for path in ("/ping", "/metrics", "/docs")
    }
    assert "content" not in answers["/ping"]
    assert list(answers["/metrics"]["content"]) == ["text/plain"]
    assert list(answers["/docs"]["content"]) == ["text/html"]


def test_every_field_of_a_request_is_explained() -> None:
    schemas = component_schemas(Operation("", ChatRequest))
    unexplained = [
        name for name, field in schemas["ChatRequest"]["properties"].items() if "description" not in field
    ]
    assert set(unexplained) <= {"stream_options", "safety_identifier", "prompt_cache_key", "metadata"}


def test_the_page_shows_every_route_and_field(server: Served, description: Any) -> None:
    """The page shows every route and field, and loads no file from elsewhere."""
    response = server.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    for path, methods in description["paths"].items():
        assert f"{path}</code>" in response.text
        for operation in methods.values():
            assert f'<a href="#{operation["operationId"]}" title=' in response.text
            assert f'id="{operation["operationId"]}"' in response.text
    for field in ("max_completion_tokens", "return_token_strs", "previous_response_id"):
        assert f"<code>{field}</code>" in response.text
    assert "https://" not in response.text


def test_every_route_of_the_page_is_in_a_group(description: Any) -> None:
    starts = [start for _, group in GROUPS for start in group]
    for start in starts:
        assert any(path.startswith(start) for path in description["paths"]), start
    others = {path for path in description["paths"] if not path.startswith(tuple(starts))}
    assert all(path.startswith(("/admin/", "/v1/router")) or path.count("/") == 1 for path in others)
