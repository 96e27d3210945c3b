"""vLLM's routes that load and unload LoRA adapters while the server runs. `auth.Authentication` checks the
admin keys."""

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from streamserve.api.generation import AppContext
from streamserve.api.http.body import read_request
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
        msgspec.Meta(min_length=1, max_length=4096, description="its folder on the server, in PEFT's layout"),
    ]


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unload a LoRA adapter."""

    lora_name: AdapterName
    lora_int_id: Annotated[int | None, about("vLLM's number of the adapter; without effect")] = None


async def load(context: AppContext, request: Request) -> Response:
    """Load an adapter. Raises RequestError if it cannot be served."""
    body = await read_request(request, context, LoadAdapterRequest)
    _check_one_model(context)
    await context.llm.load_adapter(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(context: AppContext, request: Request) -> Response:
    """Unload an adapter. Raises RequestError (404) if there is none of this name."""
    body = await read_request(request, context, UnloadAdapterRequest)
    _check_one_model(context)
    await context.llm.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_one_model(context: AppContext) -> None:
    if context.models is not None:
        raise RequestError("LoRA adapters are served for one model that stays loaded, not on demand")


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
            description="Load a LoRA adapter at all workers. Requests then choose it by `model`. Needs an "
            "admin key.",
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
            description="Refuse new requests for a LoRA adapter; open ones run to completion, and then its "
            "memory is free. Needs an admin key.",
        ),
    ),
)
