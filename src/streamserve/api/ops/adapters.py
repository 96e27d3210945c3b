"""vLLM's routes that load and unload LoRA adapters while the server runs; `model` says for which of several
models. `auth.Authentication` checks the admin keys."""

from contextlib import nullcontext
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from streamserve.api.generation import AppContext
from streamserve.api.http.body import read_request
from streamserve.api.on_demand import routed
from streamserve.api.ops.models import served_name
from streamserve.api.routes import Operation, Route
from streamserve.protocol.adapters import MAX_NAME
from streamserve.protocol.errors import RequestError
from streamserve.protocol.setting_types import about

AdapterName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=MAX_NAME, description="name of the adapter")
]


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load a LoRA adapter."""

    lora_name: AdapterName
    lora_path: Annotated[
        str,
        msgspec.Meta(
            min_length=1, max_length=4096, description="the adapter's folder on the server, in PEFT's layout"
        ),
    ]
    model: Annotated[
        str | None,
        about(
            "a name of the model that the adapter was trained for; required if the server has several models"
        ),
    ] = None


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unload a LoRA adapter."""

    lora_name: AdapterName
    model: Annotated[
        str | None, about("a name of the model that the adapter was trained for; not required")
    ] = None
    lora_int_id: Annotated[int | None, about("the adapter's number in vLLM; without effect")] = None


async def load(context: AppContext, request: Request) -> Response:
    """Load an adapter, and its model if that is not loaded. Raises RequestError if it cannot be served."""
    body = await read_request(request, context, LoadAdapterRequest)
    models = context.models
    if models is not None and body.model is None and len(models.contexts) > 1:
        names = ", ".join(models.contexts)
        raise RequestError(f"model is required, as this server has several models: {names}", field="model")
    with nullcontext() if models is None else models.reserved(body.lora_name):
        context = await routed(context, request, body.model)
        await context.llm.load_adapter(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(context: AppContext, request: Request) -> Response:
    """Unload an adapter. Raises RequestError (404) if there is none of this name, or not of the model."""
    body = await read_request(request, context, UnloadAdapterRequest)
    await _owner(context, body).llm.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _owner(context: AppContext, body: UnloadAdapterRequest) -> AppContext:
    """Return the context of the model that an adapter is of; it need not be loaded."""
    models = context.models
    if models is None:
        served_name(context.llm, body.model)
        return context
    owner = models.owner_of(body.lora_name)
    if owner is None or (body.model is not None and models.find(body.model) != owner):
        where = "" if body.model is None else f" for the model {body.model!r}"
        raise RequestError(
            f"The LoRA adapter '{body.lora_name}' does not exist{where}", field="lora_name", status=404
        )
    return models.contexts[owner]


ADAPTER_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/v1/load_lora_adapter",
        load,
        Operation(
            "Load a LoRA adapter",
            LoadAdapterRequest,
            example={"lora_name": "sql", "lora_path": "/adapters/sql"},
            media="text/plain",
            errors=(403, 404, 409),
            description="Load a LoRA adapter at all workers of its model. A model that is not loaded is "
            "loaded first. Requests then choose the adapter by `model`. Needs an admin key.",
        ),
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        unload,
        Operation(
            "Unload a LoRA adapter",
            UnloadAdapterRequest,
            example={"lora_name": "sql"},
            media="text/plain",
            errors=(403, 404),
            description="Refuse new requests for a LoRA adapter. Open requests run to completion, and then "
            "the adapter's memory is freed. Needs an admin key.",
        ),
    ),
)
