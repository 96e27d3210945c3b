"""GET /v1/models: the names under which this server serves its model."""

import msgspec
from fastapi import APIRouter, Response

from streamserve.api.generator import Generator
from streamserve.api.ops.openapi import described
from streamserve.protocol.errors import RequestError


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name of the model. `root` is where its tokenizer can be loaded from. `row_invariant`: the backend
    guarantees that the output of a request does not depend on co-batched requests."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "streamserve"
    root: str
    max_model_len: int
    row_invariant: bool


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names of the model."""

    object: str = "list"
    data: list[ModelCard]


def served_name(llm: Generator, requested: str | None) -> str:
    """Return the model name of a request, by default the first one.

    Raises RequestError (404) for unknown names.
    """
    if requested is None:
        return llm.served_names[0]
    if requested not in llm.served_names:
        names = ", ".join(llm.served_names)
        raise RequestError(
            f"The model '{requested}' does not exist; this server has: {names}", field="model", status=404
        )
    return requested


def model_routes(llm: Generator) -> APIRouter:
    """Build the routes."""
    router = APIRouter()

    def card(name: str) -> ModelCard:
        model = llm.model
        return ModelCard(
            id=name,
            created=llm.created,
            root=llm.root,
            max_model_len=model.max_model_len,
            row_invariant=model.row_invariant,
        )

    @router.get("/v1/models", openapi_extra=described("The names of the model", reply=ModelList))
    async def models() -> Response:
        cards = ModelList(data=[card(name) for name in llm.served_names])
        return Response(msgspec.json.encode(cards), media_type="application/json")

    @router.get(
        "/v1/models/{name:path}",
        openapi_extra=described("One model name", reply=ModelCard, errors=(404, 503)),
    )
    async def model(name: str) -> Response:
        body = card(served_name(llm, name))
        return Response(msgspec.json.encode(body), media_type="application/json")

    return router
