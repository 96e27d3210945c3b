"""Embeddings, scores and reranking over HTTP equal those of transformers, whatever other requests are in the
batch."""

import asyncio
import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from streamserve import LLM, SamplingParams
from streamserve.api.generator import Generator
from streamserve.api.settings import ApiSettings
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest
from streamserve.settings.resolve import resolve
from streamserve.text.reranker import INSTRUCTION
from tests.api.refusing import refused
from tests.api.routes import OF_VECTORS
from tests.api.serving import Served, served, until
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.embedders import make_embedder, make_judge, reference_embedding, reference_logits, write_modules

TEXTS = [
    "the quick brown fox",
    "a request has a prompt",
    "def add(first, second):",
    "x",
    "the lazy dog " * 30,
]
QUICK = {"threads": 1, "num_blocks": 200, "log_level": "warning", "check": True}


@contextmanager
def serving(folder: Path, settings: ApiSettings | None = None, **options: Any) -> Iterator[Served]:
    async def start() -> Generator:
        llm = AsyncLLM(resolve(str(folder), QUICK | {"served_model_name": ["small"]} | options))
        await llm.start()
        return llm

    with served(start, settings) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    """A server that divides prompts into small chunks, and runs few sequences at once."""
    with serving(folder, max_chunk=16, max_num_batched_tokens=48, max_num_seqs=4) as running:
        yield running


def unit(vector: Any) -> Any:
    numbers = np.asarray(vector, np.float64)
    return numbers / np.linalg.norm(numbers)


def embeddings(server: Served, texts: Any, **options: Any) -> list[list[float]]:
    """Return the embeddings by the official client, which asks for base64."""
    reply = server.client.embeddings.create(model="small", input=texts, **options)
    assert [each.index for each in reply.data] == list(range(len(reply.data)))
    return [each.embedding for each in reply.data]


def test_embeddings_are_those_of_transformers(server: Served, folder: Path) -> None:
    for text, found in zip(TEXTS, embeddings(server, TEXTS), strict=True):
        ids = server.llm.tokenizer.encode(text)
        assert ids[-1] == server.llm.tokenizer.special_id("<|end|>")
        expected = unit(reference_embedding(folder, ids))
        assert np.abs(np.array(found) - expected).max() < 1e-4
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def test_an_embedding_has_the_same_bits_alone_chunked_cached_and_in_a_batch(
    server: Served, folder: Path
) -> None:
    together = embeddings(server, TEXTS)
    again = embeddings(server, TEXTS)
    alone = [embeddings(server, text)[0] for text in reversed(TEXTS)][::-1]
    with serving(folder, max_chunk=512, enable_prefix_caching=False, preempt_every=2) as other:
        whole = embeddings(other, TEXTS)
    assert together == again == alone == whole
    until(lambda: server.llm.report().prefix_hits > 0)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_mean_is_that_of_all_tokens_however_they_are_computed(
    tmp_path: Path, architecture: str, scale: Scale
) -> None:
    if not scale.full and architecture == "llama":
        pytest.skip("with --full; all others here are of its architecture")
    folder = make_embedder(tmp_path / "mean", "mean_tokens", architecture)
    with serving(folder, max_chunk=7, preempt_every=3, num_blocks=60) as one, serving(folder) as two:
        small, large = embeddings(one, TEXTS), embeddings(two, [*TEXTS, *TEXTS])
        until(lambda: one.llm.report().preemptions > 0)
        ids = [one.llm.tokenizer.encode(text) for text in TEXTS]
    assert small == large[: len(TEXTS)] == large[len(TEXTS) :]
    for each, found in zip(ids, small, strict=True):
        expected = unit(reference_embedding(folder, each, "mean_tokens"))
        assert np.abs(np.array(found) - expected).max() < 1e-4


def test_inputs_are_texts_or_tokens(server: Served) -> None:
    ids = [server.llm.tokenizer.encode(text) for text in TEXTS[:2]]
    assert embeddings(server, ids) == embeddings(server, TEXTS[:2])
    assert embeddings(server, ids[0]) == embeddings(server, TEXTS[0])
    reply = server.post("/v1/embeddings", input=TEXTS[:2]).json()
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == sum(map(len, ids))
    assert reply["model"] == "small"


def test_numbers_and_base64_are_the_same_bits(server: Served) -> None:
    numbers, text = (
        server.post("/v1/embeddings", input="the", encoding_format=format).json()["data"][0]["embedding"]
        for format in ("float", "base64")
    )
    assert np.array(numbers, np.float32).tobytes() == base64.b64decode(text)


def test_shortened_embeddings_are_normalized_again(server: Served) -> None:
    whole, short = embeddings(server, "the fox")[0], embeddings(server, "the fox", dimensions=8)[0]
    assert len(short) == 8
    assert np.abs(unit(whole[:8]) - np.array(short)).max() < 1e-6


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [400]}, "input"),
        ({"input": [1] * 600}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 1 << 20}, "truncate_prompt_tokens"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
        ({}, "input"),
    ],
)
def test_wrong_requests_name_the_field(server: Served, body: dict[str, Any], field: str) -> None:
    assert refused(server.post("/v1/embeddings", **body), 400)["param"] == field


@pytest.mark.parametrize("path", OF_VECTORS)
def test_replies_are_as_described(server: Served, path: str) -> None:
    description = server.http.get("/openapi.json").json()
    operation = description["paths"][path]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    reply = server.post(path, **content["examples"]["request"]["value"])
    assert reply.status_code == 200
    described = operation["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(reply.json(), described | {"components": description["components"]})


def test_a_model_that_embeds_generates_no_text(server: Served) -> None:
    for route, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/streams", {}),
    ):
        error = refused(server.post(route, **body), 400)
        assert "generates no text: its task is embed" in error["message"]
    assert embeddings(server, "a")


def test_a_model_that_generates_embeds_only_if_told(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama")
    with serving(folder) as plain:
        for route, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ):
            assert "--task" in refused(plain.post(route, **body), 400)["message"]
    with serving(folder, task="embed") as told:
        (found,) = embeddings(told, "the fox")
        expected = unit(reference_embedding(folder, told.llm.tokenizer.encode("the fox")))
    assert np.abs(np.array(found) - expected).max() < 1e-4


def test_scores_of_embeddings_are_cosine_similarities(server: Served) -> None:
    query, *documents = TEXTS
    vectors = [unit(each) for each in embeddings(server, TEXTS)]
    expected = [float(vectors[0] @ vector) for vector in vectors[1:]]
    reply = server.post("/v1/score", text_1=query, text_2=documents).json()
    scores = [each["score"] for each in reply["data"]]
    assert scores == pytest.approx(expected, abs=1e-6)
    pairs = server.post("/v1/score", text_1=[query] * len(documents), text_2=documents).json()
    assert [each["score"] for each in pairs["data"]] == scores
    assert refused(server.post("/v1/score", text_1=[query] * 2, text_2=documents), 400)["param"] == "text_1"

    ranked = server.post("/v1/rerank", query=query, documents=documents).json()["results"]
    assert [each["relevance_score"] for each in ranked] == sorted(scores, reverse=True)
    assert all(documents[each["index"]] == each["document"]["text"] for each in ranked)
    objects = [{"text": text} for text in documents]
    for path in ("/rerank", "/v2/rerank"):
        body = {"query": query, "documents": objects, "top_n": 2, "return_documents": False}
        best = server.post(path, **body).json()["results"]
        assert [each["index"] for each in best] == [each["index"] for each in ranked[:2]]
        assert best[0]["document"] is None
    assert refused(server.post("/v1/rerank", query="a", documents=[]), 400)["param"] == "documents"
    assert refused(server.post("/v1/rerank", query="a", documents=["b"], instruction="c"), 400)


def test_a_reranking_model_judges_by_its_logits_of_yes_and_no(tmp_path: Path) -> None:
    folder = make_judge(tmp_path / "judge")
    query, *documents = TEXTS
    with serving(folder, task="score", max_chunk=32, max_num_seqs=3) as server:
        body = {"text_1": query, "text_2": documents}
        scores = [each["score"] for each in server.post("/v1/score", **body).json()["data"]]
        alone = [
            server.post("/score", text_1=query, text_2=document).json()["data"][0]["score"]
            for document in documents
        ]
        other = server.post("/v1/score", **body, instruction="Find code").json()["data"][0]["score"]
        assert scores == alone
        assert other != scores[0]
        tokenizer, judge = server.llm.tokenizer, server.llm.scoring
        assert refused(server.post("/v1/embeddings", input="a"), 400)["param"] == "model"
        for document, score in zip(documents, scores, strict=True):
            prompt = judge.prompt(query, document).text
            assert f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}<|im_end|>" in prompt
            logits = reference_logits(folder, tokenizer.encode(prompt, add_special_tokens=False))
            expected = logits[[judge.no, judge.yes]].softmax(0)[1]
            assert score == pytest.approx(float(expected), abs=1e-4)
        results = server.post("/v1/rerank", query=query, documents=documents).json()["results"]
        assert [each["relevance_score"] for each in results] == sorted(scores, reverse=True)


def test_a_client_that_goes_away_frees_its_memory(server: Served) -> None:
    body = {"input": [f"{number} " + "the lazy dog " * 38 for number in range(900)]}

    def give_up() -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 (any error of the library)
            server.http.post("/v1/embeddings", json=body, timeout=5)

    thread = threading.Thread(target=give_up)
    thread.start()
    until(lambda: server.active_sequences() > 0)
    thread.join()
    until(lambda: server.active_sequences() == 0)
    assert server.llm.report().blocks_live == 0


def test_requests_are_counted_limited_and_authorized(folder: Path) -> None:
    with serving(
        folder, ApiSettings(api_key=[digest("key")], max_requests=2, max_memory_bytes=1 << 20)
    ) as server:
        assert server.post("/v1/embeddings", input="a").status_code == 401
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
        assert len(client.embeddings.create(model="small", input=["a", "b"]).data) == 2
        with pytest.raises(openai.BadRequestError, match="input has 3 entries"):
            client.embeddings.create(model="small", input=["a", "b", "c"])
        metrics = server.http.get("/metrics", headers={"Authorization": "Bearer key"}).text
    assert "streamserve:prompt_tokens_total" in metrics


def test_a_script_embeds(folder: Path, server: Served) -> None:
    with LLM(str(folder), **QUICK) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        assert [output.outputs.embedding for output in found] == embeddings(server, TEXTS)
        assert llm.embed("a", dimensions=4)[0].outputs.hidden_size == 4
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        assert [output.outputs.score for output in scores] == [
            each["score"] for each in server.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()["data"]
        ]
        assert scores[0].outputs.score == pytest.approx(1)
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate("a", SamplingParams(), use_tqdm=False)


def test_a_script_scores_with_the_overrides_of_vllm(tmp_path: Path) -> None:
    folder, (query, *documents) = make_judge(tmp_path / "judge"), TEXTS
    overrides = {"classifier_from_token": ["no", "yes"]}
    with LLM(str(folder), hf_overrides=overrides, **QUICK) as llm:
        outputs = llm.score(query, documents, use_tqdm=False)
        (other,) = llm.score([query], [documents[0]], instruction="Find code", use_tqdm=False)
        judge, tokenizer = llm._llm.scoring, llm.tokenizer
    assert judge is not None
    for output, document in zip(outputs, documents, strict=True):
        ids = tokenizer.encode_prompt(judge.prompt(query, document), False)
        assert output.prompt_token_ids == ids
        expected = reference_logits(folder, ids)[[judge.no, judge.yes]].softmax(0)[1]
        assert output.outputs.score == pytest.approx(float(expected), abs=1e-4)
    assert other.outputs.score != outputs[0].outputs.score


async def test_the_async_client_embeds(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        replies = await asyncio.gather(*(client.embeddings.create(model="small", input=t) for t in TEXTS))
    assert [each.data[0].embedding for each in replies] == embeddings(server, TEXTS)


def test_inputs_are_truncated_to_their_last_tokens(server: Served) -> None:
    tokenizer = server.llm.tokenizer
    text = "a request has a prompt"
    before, after = tokenizer.added_special_tokens
    content = tokenizer.encode(text, add_special_tokens=False)
    count = len(before) + len(after) + 3
    (found,) = embeddings(server, text, extra_body={"truncate_prompt_tokens": count})
    (expected,) = embeddings(server, [before + content[-3:] + after])
    assert found == expected
    (whole,) = embeddings(server, text, extra_body={"truncate_prompt_tokens": -1})
    assert [whole] == embeddings(server, text)
    assert found != whole
    (last,) = embeddings(server, [content], extra_body={"truncate_prompt_tokens": 2})
    assert [last] == embeddings(server, [content[-2:]])


def test_texts_longer_than_the_model_was_made_for_are_refused(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "short")
    (copy / "sentence_bert_config.json").write_text('{"max_seq_length": 8, "do_lower_case": false}')
    config = copy / "config.json"
    config.write_text(config.read_text().replace("{", '{"matryoshka_dimensions": [32, 8],', 1))
    write_modules(copy, "lasttoken", normalize=False)
    with serving(copy) as server:
        (found,) = embeddings(server, "the fox")
        expected = reference_embedding(folder, server.llm.tokenizer.encode("the fox"))
        assert np.abs(np.array(found) - expected.numpy()).max() < 1e-4
        error = refused(server.post("/v1/embeddings", input="fox " * 9), 400)
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert "maximum context length is 8 tokens: shorten the prompt" in error["message"]
        assert len(embeddings(server, "a", dimensions=8)[0]) == 8
        error = refused(server.post("/v1/embeddings", input="a", dimensions=9), 400)
        assert "dimensions must be one of 32, 8" in error["message"]
