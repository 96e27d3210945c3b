"""POST /v1/rerank and /v1/score: the relevance of texts to each other, as in the APIs of Jina, Cohere and
vLLM.

A model that scores (--task score) judges each pair by its logits of yes and no. With an embedding model, the
score is the cosine similarity of the embeddings.
"""

import time
from collections.abc import Callable
from typing import Annotated

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
from streamserve.api.openai.prompts import Encoder
from streamserve.api.openai.schemas import Model, about
from streamserve.api.pooling import (
    PoolingUsage,
    Vectors,
    check_count,
    check_lengths,
    checked_truncation,
    longest_text,
    pool,
    truncated,
)
from streamserve.api.prompt import EncodedPrompt
from streamserve.api.routes import Operation, Route, json_response
from streamserve.extras.pooling.pooling import OTHER_IN_POOLING
from streamserve.protocol.errors import RequestError
from streamserve.protocol.request_options import RequestOptions
from streamserve.text.embedding import embedding, embedding_params, similarity
from streamserve.text.prompt_text import PromptText
from streamserve.text.reranker import END, RerankScoring

_LARGE_TEXTS = 1 << 16
"""Texts with more characters in all are searched for special tokens in the side thread."""

Pairs = list[tuple[str, str]]
"""Pairs of a query and a document."""


TruncateTo = Annotated[
    int | None,
    about(
        "maximum number of tokens of each prompt: with --task score a document loses its last tokens, with "
        "an embedding model a text its first tokens; -1: the model's maximum length",
        minimum=-1,
    ),
]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank."""

    model: Model = None
    query: Annotated[
        str, about("the text that the documents are compared with", examples=["the quick brown fox"])
    ]
    documents: Annotated[
        list[str | Document],
        about("texts, or objects with a text", examples=[["a fox", "a dog"]], minItems=1),
    ]
    top_n: Annotated[
        int | None, about("number of best documents to return; 0 or default: all documents", minimum=0)
    ] = None
    return_documents: Annotated[bool, about("return the documents' texts, too")] = True
    instruction: Annotated[
        str | None,
        about(
            "for models with --task score: what makes a document relevant; by default that it answers "
            "the query"
        ),
    ] = None
    truncate_prompt_tokens: TruncateTo = None
    priority: Annotated[int, about("requests with a lower value are served first")] = 0
    user: Annotated[str | None, about("accepted without effect")] = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score. A single `text_1` is compared with each `text_2`; several are compared pair by pair."""

    model: Model = None
    text_1: Annotated[
        str | list[str], about("the queries: a text, or a list of texts", examples=["the quick fox"])
    ]
    text_2: Annotated[
        str | list[str], about("the documents: a text, or a list of texts", examples=[["a fox"]])
    ]
    instruction: Annotated[
        str | None,
        about(
            "for models with --task score: what makes a document relevant; by default that it answers "
            "the query"
        ),
    ] = None
    truncate_prompt_tokens: TruncateTo = None
    priority: Annotated[int, about("requests with a lower value are served first")] = 0
    user: Annotated[str | None, about("accepted without effect")] = None


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """A document by its index in the request."""

    index: int
    document: Document | None
    relevance_score: float


class RerankReply(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of the `index`-th pair."""

    index: int
    object: str = "score"
    score: float


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of all pairs, in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


async def rerank(context: AppContext, request: Request) -> Response:
    """Return the documents in the order of their relevance. Raises RequestError naming the field at fault."""
    body = await read_request(request, context, RerankRequest, OTHER_IN_POOLING)
    context = await routed(context, request, body.model)
    name = served_name(context.llm, body.model)
    if body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n must be 0 (all) or more, got {body.top_n}", field="top_n")
    check_count(context, len(body.documents), "documents")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    pairs = [(body.query, text) for text in texts]
    scores, pooled = await _scores(context, request, pairs, body, "rerank", "documents")
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = [
        RerankResult(
            index=index,
            document=Document(text=texts[index]) if body.return_documents else None,
            relevance_score=scores[index],
        )
        for index in order[: body.top_n or None]
    ]
    return json_response(RerankReply(id=pooled.id, model=name, usage=pooled.usage, results=results))


async def score(context: AppContext, request: Request) -> Response:
    """Return the scores of pairs of texts. Raises RequestError naming the field at fault."""
    body = await read_request(request, context, ScoreRequest, OTHER_IN_POOLING)
    context = await routed(context, request, body.model)
    name = served_name(context.llm, body.model)
    pairs = _pairs(context, body)
    scores, pooled = await _scores(context, request, pairs, body, "score", "text_2")
    data = [Score(index=index, score=each) for index, each in enumerate(scores)]
    return json_response(
        ScoreReply(id=pooled.id, created=int(time.time()), model=name, data=data, usage=pooled.usage)
    )


def _pairs(context: AppContext, body: ScoreRequest) -> Pairs:
    queries = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    documents = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    check_count(context, len(queries), "text_1")
    check_count(context, len(documents), "text_2")
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"text_1 has {len(queries)} texts and text_2 has {len(documents)}: give one text_1, or equal "
            "numbers of texts",
            field="text_1",
        )
    return list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))


async def _scores(
    context: AppContext,
    request: Request,
    pairs: Pairs,
    body: RerankRequest | ScoreRequest,
    kind: str,
    field: str,
) -> tuple[list[float], Vectors]:
    """Return the scores of `pairs`, and the vectors from which they were computed."""
    encoder = Encoder(context.llm, context.side_thread, charge_of(request), field)
    options = RequestOptions(body.priority, context.cache_salt(caller_of(request), None))
    scoring = context.llm.scoring
    if scoring is not None:
        running = _judged(context, encoder, pairs, body, kind, options, scoring)
    else:
        if body.instruction is not None:
            raise RequestError(
                "instruction is only for models that score: for embeddings, write it into the query",
                field="instruction",
            )
        running = _compared(context, encoder, pairs, body, kind, options)
    return await while_connected(request.receive, running)


async def _judged(
    context: AppContext,
    encoder: Encoder,
    pairs: Pairs,
    body: RerankRequest | ScoreRequest,
    kind: str,
    options: RequestOptions,
    scoring: RerankScoring,
) -> tuple[list[float], Vectors]:
    """Return for each pair the probability of yes rather than no after its prompt."""
    literal = _literal(context)
    instruction = None if body.instruction is None else literal(body.instruction)

    def texts() -> list[PromptText]:
        return [scoring.prompt(literal(query), literal(document), instruction) for query, document in pairs]

    large = sum(len(query) + len(document) for query, document in pairs) > _LARGE_TEXTS
    prompts = await encoder.encode(await context.side_thread.run_if(large, texts), False, encoder.field)
    if body.truncate_prompt_tokens is not None:
        queries = dict.fromkeys(query for query, _ in pairs)
        empty = [scoring.prompt(literal(query), "", instruction) for query in queries]
        without = await encoder.encode(empty, False, encoder.field)
        prompts = _truncated(context, prompts, without, body.truncate_prompt_tokens)
    check_lengths(prompts, context.llm.model.max_model_len, encoder.field)
    pooled = await pool(context, kind, prompts, scoring.params, options)
    return [scoring.score(vector) for vector in pooled.vectors], pooled


def _truncated(
    context: AppContext, prompts: list[EncodedPrompt], without: list[EncodedPrompt], truncate_to: int
) -> list[EncodedPrompt]:
    """Return prompts of at most `truncate_to` tokens: the last tokens of a document are left out. `without`
    are the prompts without their documents. Raises RequestError as `checked_truncation` does."""
    least = 1 + max(len(prompt.ids) for prompt in without)
    count = checked_truncation(truncate_to, least, context.llm.model.max_model_len)
    end = len(context.llm.tokenizer.encode(END, add_special_tokens=False))
    return [
        prompt
        if len(prompt.ids) <= count
        else EncodedPrompt(prompt.ids[: count - end] + prompt.ids[len(prompt.ids) - end :])
        for prompt in prompts
    ]


async def _compared(
    context: AppContext,
    encoder: Encoder,
    pairs: Pairs,
    body: RerankRequest | ScoreRequest,
    kind: str,
    options: RequestOptions,
) -> tuple[list[float], Vectors]:
    """Return the cosine similarities of all pairs. Each text is embedded once."""
    config = context.llm.embedding
    if config is None:
        raise RequestError(
            f"the task of this server's model is {context.llm.task}, not score: start a server with --task "
            "score for a reranking model, or with an embedding model",
            field="model",
        )
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    check_count(context, len(texts), encoder.field)
    literal = _literal(context)
    large = sum(map(len, texts)) > _LARGE_TEXTS
    prompt_texts = await context.side_thread.run_if(large, lambda: list(map(literal, texts)))
    prompts = await encoder.encode(prompt_texts, True, encoder.field)
    limit = longest_text(context, config)
    prompts = truncated(context, prompts, body.truncate_prompt_tokens, limit, special=True)
    check_lengths(prompts, limit, encoder.field)
    encoder.charge.add(2 * len(prompts) * 4 * context.llm.model.hidden_size)
    pooled = await pool(context, kind, prompts, embedding_params(config), options)
    vectors = [embedding(vector, config) for vector in pooled.vectors]
    by_text = dict(zip(texts, vectors, strict=True))
    return [similarity(by_text[query], by_text[document]) for query, document in pairs], pooled


def _literal(context: AppContext) -> Callable[[str], PromptText]:
    """Return the function that converts the texts of a request: no special tokens are recognized in them,
    unless the settings say so."""
    return PromptText if context.settings.special_tokens_in_messages else context.llm.tokenizer.literal


_RERANK = Operation(
    "Documents sorted by their relevance to a query",
    RerankRequest,
    RerankReply,
    others=OTHER_IN_POOLING,
    example={"query": "the quick brown fox", "documents": ["a fox", "a dog"]},
)
_SCORE = Operation(
    "Scores of pairs of texts",
    ScoreRequest,
    ScoreReply,
    others=OTHER_IN_POOLING,
    example={"text_1": "the quick brown fox", "text_2": ["a fox", "a dog"]},
)
RERANK_ROUTES: tuple[Route[AppContext], ...] = (
    *(Route("POST", path, rerank, _RERANK) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
    *(Route("POST", path, score, _SCORE) for path in ("/v1/score", "/score")),
)
