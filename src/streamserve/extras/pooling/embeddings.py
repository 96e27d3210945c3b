"""POST /v1/embeddings: OpenAI's API for the embeddings of texts."""

import base64
import time
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.http.auth import caller_of
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.limits import charge_of
from streamserve.api.leases import routed
from streamserve.api.model_table import served_name
from streamserve.api.openai.prompts import Encoder, completion_prompts
from streamserve.api.openai.schemas import Model, about
from streamserve.api.pooling import (
    LARGE_REPLY,
    NUMBER_BYTES,
    PoolingUsage,
    Vectors,
    check_count,
    check_lengths,
    embedding_config,
    longest_text,
    pool,
    truncated,
)
from streamserve.api.routes import JSON, Operation, Route
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.extras.pooling.pooling import OTHER_IN_POOLING
from streamserve.protocol.errors import RequestError
from streamserve.protocol.request_options import RequestOptions
from streamserve.text.embedding import check_dimensions, embedding, embedding_params


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    model: Model = None
    input: Annotated[
        str | list[str | int | list[int]],
        about(
            "a text, a list of texts, token ids, or a list of lists of token ids",
            examples=["Once upon a time"],
        ),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"],
        about("float: a list of numbers; base64: the bytes of little-endian float32 numbers"),
    ] = "float"
    dimensions: Annotated[
        int | None,
        about(
            "number of dimensions to return, for models trained for shorter embeddings (Matryoshka)",
            minimum=1,
        ),
    ] = None
    add_special_tokens: Annotated[
        bool, about("let the tokenizer add its special tokens; the model may need the last one for pooling")
    ] = True
    truncate_prompt_tokens: Annotated[
        int | None,
        about(
            "retain only this many of each input's last tokens, including the special tokens that the "
            "tokenizer adds; -1: up to the model's maximum length",
            minimum=-1,
        ),
    ] = None
    priority: Annotated[int, about("requests with a lower value are served first")] = 0
    cache_salt: Annotated[str | None, about("only requests with the same salt share a prefix's KV")] = None
    user: Annotated[str | None, about("accepted without effect")] = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of the `index`-th input."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of all inputs, in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


async def embeddings(context: AppContext, request: Request) -> Response:
    """Return the embeddings of the inputs. Raises RequestError naming the field at fault."""
    body = await read_request(request, context, EmbeddingRequest, OTHER_IN_POOLING)
    context = await routed(context, request, body.model)
    name = served_name(context.llm, body.model)
    config, size = embedding_config(context), context.llm.model.hidden_size
    check_dimensions(body.dimensions, config, size)
    if isinstance(body.input, list):
        tokens = bool(body.input) and all(type(item) is int for item in body.input)
        check_count(context, 1 if tokens else len(body.input), "input")
    if body.cache_salt == "":
        raise RequestError("cache_salt must not be empty", field="cache_salt")
    charge = charge_of(request)
    encoder = Encoder(context.llm, context.side_thread, charge, "input")
    prompts = await completion_prompts(
        encoder, body.input, body.add_special_tokens, context.settings.max_requests
    )
    limit = longest_text(context, config)
    special = body.add_special_tokens and any(prompt.text is not None for prompt in prompts)
    prompts = truncated(context, prompts, body.truncate_prompt_tokens, limit, special)
    check_lengths(prompts, limit, "input")
    numbers = len(prompts) * (body.dimensions or size)
    charge.add(numbers * NUMBER_BYTES)
    options = RequestOptions(body.priority, context.cache_salt(caller_of(request), body.cache_salt))
    running = pool(context, "embd", prompts, embedding_params(config), options)
    pooled = await while_connected(request.receive, running)
    reply = await context.side_thread.run_if(
        numbers > LARGE_REPLY, lambda: msgspec.json.encode(_reply(body, name, config, pooled))
    )
    return Response(reply, media_type=JSON)


EMBEDDING_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        Operation(
            "Embeddings of texts",
            EmbeddingRequest,
            EmbeddingReply,
            others=OTHER_IN_POOLING,
            example={"input": ["Once upon a time"]},
        ),
    ),
)


def _reply(body: EmbeddingRequest, name: str, config: EmbeddingConfig, pooled: Vectors) -> EmbeddingReply:
    def encoded(vector: bytes) -> list[float] | str:
        numbers = embedding(vector, config, body.dimensions)
        if body.encoding_format == "base64":
            return base64.b64encode(numbers.astype("<f4").tobytes()).decode()
        return [float(number) for number in numbers]

    data = [Embedding(index=index, embedding=encoded(vector)) for index, vector in enumerate(pooled.vectors)]
    return EmbeddingReply(id=pooled.id, created=int(time.time()), model=name, data=data, usage=pooled.usage)
