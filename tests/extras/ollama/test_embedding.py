"""POST /api/embed and /api/embeddings, on a scripted model whose vectors are known."""

from collections.abc import AsyncGenerator, Iterator

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from streamserve.api.generator import Item
from streamserve.api.prompt import EncodedPrompt
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.extras.ollama.embedding import _shortened
from streamserve.protocol.messages import Pooled
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.extras.ollama.asking import ask, refusal
from tests.text.folders import byte_level_folder

EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"
VECTOR = np.array([3.0, 4.0, 0.0, 12.0], "<f4")
LIMIT = 8


async def pooled(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    yield Pooled("", 0, (VECTOR * len(prompt)).tobytes())
    yield Usage(len(prompt), 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that adds one token before each text and one after it."""
    folder = byte_level_folder(tmp_path_factory.mktemp("embedder"))
    file = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    ids = [(token, backend.token_to_id(token)) for token in ("<|begin|>", "<|end|>")]
    backend.post_processor = TemplateProcessing(single="<|begin|> $A <|end|>", special_tokens=ids)
    backend.save(file)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    config = EmbeddingConfig(max_tokens=LIMIT)
    generator = ScriptedGenerator(tokenizer, pooled, task="embed", embedding=config, served_names=("small",))
    model = msgspec.structs.replace(generator.model, hidden_size=4)
    with scripted(generator.replaced(model=model)) as running:
        yield running


def test_texts_are_embedded_in_their_order(server: Served, tokenizer: Tokenizer) -> None:
    texts = ["a", "b c", "a"]
    reply = ask(server, EMBED, model="small:latest", input=texts)
    assert reply["model"] == "small:latest"
    assert reply["embeddings"] == [pytest.approx([3 / 13, 4 / 13, 0, 12 / 13])] * 3
    prompts = [submitted.prompt for submitted in server.llm.submitted[-3:]]
    assert sorted(prompts) == sorted(tokenizer.encode(text) for text in texts)
    assert reply["prompt_eval_count"] == sum(map(len, prompts))
    assert reply["total_duration"] > reply["load_duration"] > 0


def test_one_text_and_fewer_dimensions(server: Served) -> None:
    assert ask(server, EMBED, input="a", dimensions=2)["embeddings"] == [pytest.approx([0.6, 0.8])]
    assert "dimensions must be between 1 and 4" in refusal(server, EMBED, input="a", dimensions=5)


def test_the_older_route_embeds_one_text(server: Served) -> None:
    assert ask(server, EMBEDDINGS, prompt="a") == {"embedding": pytest.approx([3 / 13, 4 / 13, 0, 12 / 13])}
    assert refusal(server, EMBEDDINGS, input="a") == "input is not supported (use prompt, or /api/embed)"
    assert refusal(server, EMBED, prompt="a") == "prompt is not supported (use input)"


def test_a_long_text_is_shortened_unless_that_is_refused(server: Served, tokenizer: Tokenizer) -> None:
    text = "a b c d e f g h i j k"
    ask(server, EMBED, input=text)
    (submitted,) = server.llm.submitted[-1:]
    assert len(submitted.prompt) == LIMIT
    assert tokenizer.decode(submitted.prompt[1:-1]) == text[: len(tokenizer.decode(submitted.prompt[1:-1]))]
    assert "prompt is too long: " in refusal(server, EMBED, input=text, truncate=False)


@settings(max_examples=50)
@given(text=st.text("ab é日", min_size=1, max_size=30), limit=st.integers(2, 40))
def test_the_tokens_that_the_tokenizer_adds_are_kept(tokenizer: Tokenizer, text: str, limit: int) -> None:
    whole = tokenizer.encode(text)
    shortened = _shortened(tokenizer, EncodedPrompt(whole, text), limit).ids
    assert len(shortened) == min(limit, len(whole))
    assert (shortened[0], shortened[-1]) == (whole[0], whole[-1])
    assert shortened[:-1] == whole[: len(shortened) - 1]


def test_options_and_keep_alive_have_no_effect(server: Served) -> None:
    reply = server.post(EMBED, input="a", options={"num_ctx": 5}, keep_alive="5m")
    assert reply.status_code == 200
    assert "without effect: options, keep_alive" in reply.headers["warning"]


@pytest.mark.parametrize("route", [EMBED, EMBEDDINGS])
def test_other_models_do_not_embed(tokenizer: Tokenizer, route: str) -> None:
    with scripted(ScriptedGenerator(tokenizer)) as server:
        field = "input" if route == EMBED else "prompt"
        assert "--task embed" in refusal(server, route, **{field: "a"})


def test_lists_of_other_lengths_are_refused(server: Served) -> None:
    assert "input has 0 entries" in refusal(server, EMBED, input=[])
    assert "input has 1025 entries" in refusal(server, EMBED, input=["a"] * 1025)
