"""Scores of pairs of texts in scripts, as /v1/score computes them."""

from collections.abc import Sequence

from streamserve.llm.chats import encode
from streamserve.llm.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput
from streamserve.llm.prompts import Prompt
from streamserve.protocol.errors import RequestError
from streamserve.text.reranker import RerankScoring
from streamserve.text.tokenizer import Tokenizer


def text_pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs to score: one text with each of the others, or equal numbers of texts one by one.
    Raises RequestError for other numbers."""
    queries = [first] if isinstance(first, str) else list(first)
    documents = [second] if isinstance(second, str) else list(second)
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        raise RequestError(
            f"there are {len(queries)} first texts and {len(documents)} second texts: give one first text, "
            "or equal numbers of texts",
            field="text_1",
        )
    return list(zip(queries, documents, strict=True))


def judging_prompts(
    tokenizer: Tokenizer, scoring: RerankScoring, pairs: Sequence[tuple[str, str]], instruction: str | None
) -> list[Prompt]:
    """Return the prompts with which a reranking model judges pairs. No special tokens are recognized in the
    texts."""
    instruct = None if instruction is None else tokenizer.literal(instruction)
    texts = [
        scoring.prompt(tokenizer.literal(query), tokenizer.literal(document), instruct)
        for query, document in pairs
    ]
    return [encode(tokenizer, text, add_special_tokens=False) for text in texts]


def scored(output: RequestOutput, score: float) -> ScoringRequestOutput:
    """Return the score of a pair; `output` is of the request that was made for it."""
    return ScoringRequestOutput(output.request_id, ScoringOutput(score), output.prompt_token_ids)
