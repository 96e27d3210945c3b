"""POST /api/embed, and the older /api/embeddings: Ollama's routes for the embeddings of texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.http.auth import caller_of
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.limits import charge_of
from streamserve.api.leases import routed
from streamserve.api.model_table import served_name
from streamserve.api.openai.prompts import Encoder
from streamserve.api.pooling import (
    LARGE_REPLY,
    NUMBER_BYTES,
    check_count,
    check_lengths,
    embedding_config,
    pool,
)
from streamserve.api.prompt import EncodedPrompt
from streamserve.api.routes import Operation, Route, json_response
from streamserve.extras.ollama.durations import RequestStopwatch
from streamserve.extras.ollama.errors import OllamaError
from streamserve.extras.ollama.models import served_as
from streamserve.extras.ollama.other_fields import OTHER_IN_EMBED, OTHER_IN_EMBEDDINGS
from streamserve.extras.ollama.schemas import (
    OllamaEmbeddingsReply,
    OllamaEmbeddingsRequest,
    OllamaEmbedReply,
    OllamaEmbedRequest,
)
from streamserve.protocol.request_options import RequestOptions
from streamserve.text.embedding import check_dimensions, embedding, embedding_params
from streamserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EmbeddedTexts:
    """Embeddings of texts, the name of their model, and the number of the texts' tokens."""

    model: str
    vectors: list[list[float]]
    tokens: int


async def embed(context: AppContext, request: Request) -> Response:
    """Return the embeddings of texts. Raises RequestError naming the field at fault."""
    stopwatch = RequestStopwatch()
    body = await read_request(request, context, OllamaEmbedRequest, OTHER_IN_EMBED)
    texts = [body.input] if isinstance(body.input, str) else body.input
    made = await _embedded(context, request, body, texts, stopwatch, "input")
    reply = OllamaEmbedReply(
        model=body.model or made.model,
        embeddings=made.vectors,
        prompt_eval_count=made.tokens,
        **stopwatch.without_text(),
    )
    return await _response(context, reply, made)


async def embeddings(context: AppContext, request: Request) -> Response:
    """Return the embedding of one text. Raises RequestError naming the field at fault."""
    body = await read_request(request, context, OllamaEmbeddingsRequest, OTHER_IN_EMBEDDINGS)
    asked = OllamaEmbedRequest(model=body.model, input=body.prompt)
    made = await _embedded(context, request, asked, [body.prompt], RequestStopwatch(), "prompt")
    return await _response(context, OllamaEmbeddingsReply(made.vectors[0]), made)


OLLAMA_EMBEDDING_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/api/embed",
        embed,
        Operation(
            "Embeddings of texts, in Ollama's API",
            OllamaEmbedRequest,
            OllamaEmbedReply,
            others=OTHER_IN_EMBED,
            error=OllamaError,
            example={"input": ["Once upon a time"]},
        ),
    ),
    Route(
        "POST",
        "/api/embeddings",
        embeddings,
        Operation(
            "The embedding of a text, in Ollama's older API",
            OllamaEmbeddingsRequest,
            OllamaEmbeddingsReply,
            others=OTHER_IN_EMBEDDINGS,
            error=OllamaError,
            example={"prompt": "Once upon a time"},
        ),
    ),
)


async def _embedded(
    context: AppContext,
    request: Request,
    body: OllamaEmbedRequest,
    texts: Sequence[str],
    stopwatch: RequestStopwatch,
    field: str,
) -> EmbeddedTexts:
    """Embed `texts`, the value of `field`."""
    requested = served_as(context.models, body.model)
    context = await stopwatch.loading(routed(context, request, requested))
    config, size = embedding_config(context), context.llm.model.hidden_size
    check_dimensions(body.dimensions, config, size)
    check_count(context, len(texts), field)
    charge = charge_of(request)
    prompts = await Encoder(context.llm, context.side_thread, charge, field).encode([*texts], True, field)
    limit = config.max_tokens or context.llm.model.max_model_len
    if body.truncate:
        prompts = [_shortened(context.llm.tokenizer, prompt, limit) for prompt in prompts]
    check_lengths(prompts, limit, field)
    charge.add(len(prompts) * (body.dimensions or size) * NUMBER_BYTES)
    options = RequestOptions(cache_salt=context.cache_salt(caller_of(request), None))
    running = pool(context, "embd", prompts, embedding_params(config), options)
    pooled = await while_connected(request.receive, running)
    vectors = [embedding(vector, config, body.dimensions).tolist() for vector in pooled.vectors]
    return EmbeddedTexts(served_name(context.llm, requested), vectors, pooled.usage.prompt_tokens)


def _shortened(tokenizer: Tokenizer, prompt: EncodedPrompt, limit: int) -> EncodedPrompt:
    """Return a text with at most `limit` tokens: its first ones, between the tokens that the tokenizer adds
    to each text."""
    if len(prompt.ids) <= limit:
        return prompt
    text = tokenizer.encode(prompt.text or "", False)
    added = len(prompt.ids) - len(text)
    before = next(place for place in range(added + 1) if prompt.ids[place : place + len(text)] == text)
    after = added - before
    return EncodedPrompt(prompt.ids[: limit - after] + prompt.ids[len(prompt.ids) - after :])


async def _response(
    context: AppContext, reply: OllamaEmbedReply | OllamaEmbeddingsReply, made: EmbeddedTexts
) -> Response:
    large = sum(map(len, made.vectors)) > LARGE_REPLY
    return await context.side_thread.run_if(large, lambda: json_response(reply))
