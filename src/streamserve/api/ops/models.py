"""GET /v1/models: the names under which this server serves its model, and the names of its LoRA adapters."""

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.generation import AppContext
from streamserve.api.generator import Generator
from streamserve.api.routes import Operation, Route, json_response
from streamserve.protocol.errors import RequestError


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name of a model.

    - `root`: where its tokenizer can be loaded from; for a LoRA adapter, its folder.
    - `row_invariant`: whether the backend guarantees that the output of a request does not depend on
      co-batched requests.
    - `precision`: of weights and KV cache.
    - `numerics`: all properties on which the bits of a text depend, besides weights and settings.
    - `notice`: information about the model for users.
    - `state`: of a model that is loaded on demand: loaded, loading, unloading, not loaded; for a LoRA
      adapter, its model's.
    - `memory`: the bytes that the model takes while it is loaded.
    - `parent`: the model of a LoRA adapter.

    Fields that are only known of a loaded model are left out otherwise.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "streamserve"
    root: str
    parent: str | None = None
    max_model_len: int
    row_invariant: bool | UnsetType = UNSET
    precision: str | UnsetType = UNSET
    numerics: str | UnsetType = UNSET
    notice: str | UnsetType = UNSET
    state: str | UnsetType = UNSET
    memory: int | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names of the model."""

    object: str = "list"
    data: list[ModelCard]


def served_name(llm: Generator, requested: str | None) -> str:
    """Return the served name of a request's model or LoRA adapter. By default, it is the model's first name.

    Raises RequestError (404) for unknown names.
    """
    if requested is None:
        return llm.served_names[0]
    if requested not in llm.served_names and requested not in llm.adapters:
        names = ", ".join((*llm.served_names, *llm.adapters))
        raise RequestError(
            f"The model '{requested}' does not exist; this server has: {names}", field="model", status=404
        )
    return requested


def adapter_named(llm: Generator, name: str) -> str:
    """Return the LoRA adapter with a served name; "" if it is a name of the model."""
    return name if name in llm.adapters else ""


async def models(context: AppContext, request: Request) -> Response:
    """Return all names of the model."""
    if context.models is not None:
        return json_response(ModelList(data=context.models.cards()))
    llm = context.llm
    return json_response(ModelList(data=[card_of(llm, name) for name in (*llm.served_names, *llm.adapters)]))


async def model(context: AppContext, request: Request) -> Response:
    """Return one name of the model. Raises RequestError (404) if it is unknown."""
    requested, models = request.path_params["name"], context.models
    if models is not None:
        models.find(requested)
        return json_response(next(card for card in models.cards() if card.id == requested))
    return json_response(card_of(context.llm, served_name(context.llm, requested)))


def card_of(llm: Generator, name: str) -> ModelCard:
    """Return the card of a loaded model under one of its names. Raises RequestError (503) if it is not
    loaded."""
    model = llm.model
    return msgspec.structs.replace(
        unloaded_card_of(llm, name, model.max_model_len),
        row_invariant=model.row_invariant,
        precision=model.precision,
        numerics=model.numerics,
        notice=model.notice or UNSET,
    )


def unloaded_card_of(llm: Generator, name: str, max_model_len: int) -> ModelCard:
    """Return the card, under one of its names, of a model that is not loaded, or of an adapter."""
    adapter = llm.adapters.get(name)
    return ModelCard(
        id=name,
        created=llm.created,
        root=adapter.path if adapter else llm.root,
        parent=llm.served_names[0] if adapter else None,
        max_model_len=max_model_len,
    )


MODEL_ROUTES: tuple[Route[AppContext], ...] = (
    Route("GET", "/v1/models", models, Operation("The names of the model", reply=ModelList)),
    Route(
        "GET",
        "/v1/models/{name:path}",
        model,
        Operation("One model name", reply=ModelCard, errors=(404, 503)),
    ),
)
