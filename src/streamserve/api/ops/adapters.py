"""vLLM's routes that load and unload LoRA adapters while the server runs. If there are several models,
`model` says which one. `auth.Authentication` checks the admin keys."""

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from streamserve.api.context import AppContext
from streamserve.api.http.body import read_request
from streamserve.api.leases import routed
from streamserve.api.model_table import ModelEntry, ModelTable
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
    """Load an adapter, and its model if that is not loaded. Raises RequestError if the adapter cannot be
    served."""
    body = await read_request(request, context, LoadAdapterRequest)
    models = context.models
    if body.model is None and len(models.entries) > 1:
        names = ", ".join(models.entries)
        raise RequestError(f"model is required, as this server has several models: {names}", field="model")
    models.find(body.model)
    with models.reserved(body.lora_name):
        context = await routed(context, request, body.model)
        await context.llm.load_adapter(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(context: AppContext, request: Request) -> Response:
    """Unload an adapter. Raises RequestError (404) if the model has no adapter with this name."""
    body = await read_request(request, context, UnloadAdapterRequest)
    await _owner(context.models, body).llm.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _owner(models: ModelTable, body: UnloadAdapterRequest) -> ModelEntry:
    """Return the model that has an adapter. The model need not be loaded. Raises RequestError (404) if no
    model has the adapter."""
    named = models.entries if body.model is None else [models.find(body.model)]
    entries = [models.entries[name] for name in named]
    owner = next((entry for entry in entries if body.lora_name in entry.llm.adapters), None)
    if owner is None:
        names = ", ".join(name for entry in entries for name in entry.llm.adapters) or "none"
        raise RequestError(
            f"The LoRA adapter '{body.lora_name}' does not exist; loaded are: {names}",
            field="lora_name",
            status=404,
        )
    return owner


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
