"""GET /api/tags, /api/ps, /api/version, and POST /api/show: a server's models as Ollama lists them."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve import __version__
from streamserve.api.context import AppContext
from streamserve.api.generator import Generator
from streamserve.api.http.body import read_request
from streamserve.api.model_table import ModelTable, served_name
from streamserve.api.routes import Operation, Route, json_response
from streamserve.extras.ollama.errors import OllamaError
from streamserve.extras.ollama.other_fields import OTHER_IN_SHOW
from streamserve.extras.ollama.schemas import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaShowReply,
    OllamaShowRequest,
    OllamaVersion,
)
from streamserve.protocol.messages import ModelInfo
from streamserve.text.reasoning import find_reasoning_format
from streamserve.text.tools.formats import find_format

API_VERSION = "0.12.11"
"""The version of Ollama whose requests are understood. Clients compare it with the version that they need."""

_TAG = ":latest"
"""Ollama's default tag. Clients append it to names without a tag."""

_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def served_as(table: ModelTable, requested: str | None) -> str | None:
    """Return a requested name without Ollama's default tag, unless a model is served under the whole name."""
    if requested is None or table.has(requested):
        return requested
    return requested.removesuffix(_TAG)


async def tags(context: AppContext, request: Request) -> Response:
    """Return all names of the models."""
    return json_response(OllamaModels(list(_models(context.models))))


async def running(context: AppContext, request: Request) -> Response:
    """Return the names of the models that are loaded. They have no time at which they are unloaded."""
    return json_response(OllamaModels(list(_models(context.models, loaded=True))))


async def show(context: AppContext, request: Request) -> Response:
    """Return the description of a model, which need not be loaded. Raises RequestError (404) for unknown
    names."""
    body = await read_request(request, context, OllamaShowRequest, OTHER_IN_SHOW)
    table = context.models
    requested = served_as(table, body.model or body.name)
    context = context.of(table.find(requested))
    llm, settings = context.llm, context.settings
    name, info = served_name(llm, requested), _info(table, table.find(requested))
    sampling = settings.default_sampling.items()
    return json_response(
        OllamaShowReply(
            modelfile=f"FROM {llm.root}\n",
            parameters="\n".join(f"{key} {msgspec.json.encode(value).decode()}" for key, value in sampling),
            template=llm.tokenizer.chat_template or "",
            details=_details(llm, name, info),
            model_info=_model_info(info, context.model.max_model_len),
            capabilities=list(_capabilities(context)),
            modified_at=datetime.fromtimestamp(llm.created, UTC),
        )
    )


async def version(context: AppContext, request: Request) -> Response:
    """Return the version of the API, and of this server."""
    return json_response(OllamaVersion(API_VERSION, f"streamserve {__version__}"))


OLLAMA_MODEL_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "GET",
        "/api/tags",
        tags,
        Operation(
            "The names of the models, in Ollama's API", reply=OllamaModels, error=OllamaError, errors=(503,)
        ),
    ),
    Route(
        "GET",
        "/api/ps",
        running,
        Operation("The loaded models, in Ollama's API", reply=OllamaModels, error=OllamaError, errors=(503,)),
    ),
    Route(
        "POST",
        "/api/show",
        show,
        Operation(
            "The description of a model, in Ollama's API",
            OllamaShowRequest,
            OllamaShowReply,
            others=OTHER_IN_SHOW,
            error=OllamaError,
            example={},
        ),
    ),
    Route(
        "GET",
        "/api/version",
        version,
        Operation("The version of Ollama's API", reply=OllamaVersion, error=OllamaError),
    ),
)


def _models(table: ModelTable, loaded: bool = False) -> Iterator[OllamaModel]:
    """Yield each name of each model, or of each `loaded` model. Raises RequestError (503) while a model that
    is not loaded on demand is not ready."""
    for name, entry in table.entries.items():
        info, state = _info(table, name), table.pool.models.get(name)
        if info is None and loaded:
            continue
        size = state.size if state else (info.weight_bytes if info else 0)
        for served in entry.names:
            adapter = entry.llm.adapters.get(served)
            tagged = served if ":" in served else served + _TAG
            model = OllamaModel(
                name=tagged,
                model=tagged,
                modified_at=datetime.fromtimestamp(entry.llm.created, UTC),
                size=size,
                digest=adapter.fingerprint if adapter else (info.fingerprint if info else ""),
                details=_details(entry.llm, served, info),
            )
            if loaded and info is not None:
                on_gpu = size if "cuda" in info.backend else 0
                model = msgspec.structs.replace(model, size_vram=on_gpu, context_length=info.max_model_len)
            yield model


def _info(table: ModelTable, name: str) -> ModelInfo | None:
    """Return what is known of a model while it is loaded; None if it is loaded on demand and is not loaded.
    Raises RequestError (503) while another model is not ready."""
    return table.entries[name].llm.model if table.loaded(name) else None


def _details(llm: Generator, name: str, info: ModelInfo | None) -> OllamaDetails:
    file_name = llm.root.rpartition("/")[2]
    details = OllamaDetails(
        parent_model=llm.served_names[0] if name in llm.adapters else "",
        format="gguf" if ":" in file_name or file_name.endswith(".gguf") else "safetensors",
    )
    if info is None:
        return details
    family, quantized = _family(info), info.quantization != "none"
    return msgspec.structs.replace(
        details,
        family=family,
        families=[family],
        parameter_size=_count(info.parameters),
        quantization_level=info.quantization if quantized else _FLOATS.get(info.dtype, info.dtype),
    )


def _family(info: ModelInfo) -> str:
    """Return the architecture as Ollama names it: llama for LlamaForCausalLM."""
    return re.sub(r"(For|Model).*", "", info.architecture).lower()


def _count(number: int) -> str:
    """Return a number of parameters, for example 8.0B."""
    unit, letter = next((each for each in _UNITS if number >= each[0]), (1, ""))
    return f"{number / unit:.1f}{letter}" if letter else str(number)


def _model_info(info: ModelInfo | None, max_model_len: int) -> dict[str, str | int]:
    if info is None:
        return {"general.context_length": max_model_len}
    family = _family(info)
    sizes = {"embedding_length": info.hidden_size, "vocab_size": info.vocab_size}
    return {
        "general.architecture": family,
        "general.parameter_count": info.parameters,
        f"{family}.context_length": max_model_len,
        **{f"{family}.{name}": size for name, size in sizes.items() if size},
    }


def _capabilities(context: AppContext) -> Iterator[str]:
    """Yield what the model can do, in Ollama's words."""
    llm, settings = context.llm, context.settings
    signs = llm.tokenizer.template_signs
    if llm.embedding is not None:
        yield "embedding"
    if llm.task == "generate":
        yield "completion"
        if find_format(settings.tool_parser, signs) is not None:
            yield "tools"
        if find_reasoning_format(settings.reasoning_parser, signs) is not None:
            yield "thinking"
