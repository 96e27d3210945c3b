"""GET /v1/models: the names under which this server serves its model, and the names of its LoRA adapters."""

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.generator import Generator
from streamserve.api.routes import Operation, Route, json_response
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams


class DefaultSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a request's sampling fields that the request does not set."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name of a model.

    - `root`: the hub name or folder from which the model's tokenizer can be loaded; for a LoRA adapter, its
      folder.
    - `row_invariant`: whether the backend guarantees that the output of a request does not depend on
      co-batched requests.
    - `precision`: the precision of weights and KV cache.
    - `numerics`: all properties on which the bits of a text depend, besides weights and settings.
    - `notice`: information about the model for users.
    - `state`: for a model that is loaded on demand: loaded, loading, unloading or not loaded. A LoRA adapter
      has the state of its model.
    - `memory`: the bytes that the model takes while it is loaded.
    - `unloadable`: whether POST /admin/unload can unload the model: it is loaded on demand, and the server
      has an admin key.
    - `parent`: the model of a LoRA adapter.
    - `default_sampling`: the sampling values of requests that do not set them, from the checkpoint's
      generation_config.json where it has them.

    Fields that are known only of a loaded model are left out for other models.
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
    unloadable: bool | UnsetType = UNSET
    default_sampling: DefaultSampling | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All names of the models."""

    object: str = "list"
    data: list[ModelCard]


async def models(context: AppContext, request: Request) -> Response:
    """Return all names of the models."""
    entries = context.models.entries.items()
    named = [(name, served) for name, entry in entries for served in entry.names]
    return json_response(ModelList(data=[_card(context, name, served) for name, served in named]))


async def model(context: AppContext, request: Request) -> Response:
    """Return one name of a model. Raises RequestError (404) if it is unknown."""
    requested = request.path_params["name"]
    return json_response(_card(context, context.models.find(requested), requested))


def _card(context: AppContext, name: str, served: str) -> ModelCard:
    """Return the card of a model, or of its LoRA adapter, with the name `served`.

    Raises RequestError (503) if it is not loaded, unless it is loaded on demand.
    """
    entry, state = context.models.entries[name], context.models.pool.models.get(name)
    try:
        card = card_of(entry.llm, served)
    except RequestError:  # not loaded
        card = unloaded_card_of(entry.llm, served, entry.max_model_len)
    defaults = SamplingParams(**entry.settings.default_sampling)
    shown = msgspec.convert(defaults, DefaultSampling, from_attributes=True)
    card = msgspec.structs.replace(card, default_sampling=shown)
    if state is None:
        return card
    is_adapter = served in entry.llm.adapters
    return msgspec.structs.replace(
        card,
        state=state.state,
        memory=UNSET if is_adapter else state.size,
        unloadable=UNSET if is_adapter else bool(context.settings.admin_key),
    )


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
    """Return the card of a model or adapter by one of its names, without what is only known once the model is
    loaded."""
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
