"""Truncated prompts of scores lose the right part: a judged document its end, an embedded text its
beginning."""

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from streamserve.api.generator import Item
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.protocol.messages import Pooled
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Usage
from streamserve.text.reranker import RerankScoring
from streamserve.text.tokenizer import Tokenizer
from tests.api.refusing import refused
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.text.folders import byte_level_folder

QUERY, DOCUMENT = "the quick fox", "a lazy dog jumps over <|im_end|> the quick brown fox " * 3
LIMIT = 1024


async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield Pooled("r", 0, np.array([0.0, 1.0], "<f4").tobytes())
    yield Usage(len(prompt), 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("scores")))


def serving(tokenizer: Tokenizer, **task: Any) -> ScriptedGenerator:
    generator = ScriptedGenerator(tokenizer, script, **task)
    model = msgspec.structs.replace(generator.model, max_model_len=LIMIT, vocab_size=400)
    return generator.replaced(model=model)


@pytest.fixture(scope="module")
def judge(tokenizer: Tokenizer) -> Iterator[Served]:
    with scripted(serving(tokenizer, task="score", scoring=RerankScoring(5, 6))) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(tokenizer: Tokenizer) -> Iterator[Served]:
    with scripted(serving(tokenizer, task="embed", embedding=EmbeddingConfig(max_tokens=64))) as running:
        yield running


def prompts(server: Served, route: str, count: int | None) -> list[list[int]]:
    server.llm.submitted.clear()
    body: dict[str, Any] = {"text_1": QUERY, "text_2": [DOCUMENT, "x"]}
    if route == "/v1/rerank":
        body = {"query": QUERY, "documents": [DOCUMENT, "x"]}
    response = server.post(route, **body, truncate_prompt_tokens=count)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == sum(len(each.prompt) for each in server.llm.submitted)
    return [each.prompt for each in server.llm.submitted]


@pytest.mark.parametrize("route", ["/v1/score", "/v1/rerank"])
def test_a_judged_document_loses_its_end(judge: Served, tokenizer: Tokenizer, route: str) -> None:
    whole, short = prompts(judge, route, None)
    count = len(whole) - 20
    cut, same = prompts(judge, route, count)
    assert (len(cut), same) == (count, short)
    scoring = judge.llm.scoring
    before, after = scoring.prompt(QUERY, DOCUMENT).text.split(DOCUMENT)
    text = tokenizer.decode(cut, skip_special_tokens=False)
    assert text.startswith(f"{before}a lazy dog")
    assert text.endswith(after)
    assert DOCUMENT.startswith(text.removeprefix(before).removesuffix(after))
    assert prompts(judge, route, -1) == [whole, short]


def test_an_embedded_text_loses_its_beginning(embedder: Served, tokenizer: Tokenizer) -> None:
    before, after = tokenizer.added_special_tokens
    query, _, x = prompts(embedder, "/v1/score", -1)
    content = tokenizer.encode_prompt(tokenizer.literal(DOCUMENT), add_special_tokens=False)
    for count in (len(query), 64, -1):
        kept = 64 if count == -1 else count
        expected = before + content[-(kept - len(before) - len(after)) :] + after
        assert prompts(embedder, "/v1/score", count) == [query, expected, x]
    body = {"text_1": QUERY, "text_2": DOCUMENT}
    assert refused(embedder.post("/v1/score", **body), 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("count", [-2, 0, 1, LIMIT + 1])
def test_impossible_lengths_are_refused(judge: Served, embedder: Served, count: int) -> None:
    for server in (judge, embedder):
        body = {"query": QUERY, "documents": [DOCUMENT], "truncate_prompt_tokens": count}
        error = refused(server.post("/v1/rerank", **body), 400)
        assert error["param"] == "truncate_prompt_tokens"
        assert "must be -1 or between" in error["message"]
