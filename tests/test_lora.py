"""LoRA adapters work for users: over HTTP with the official client, in scripts by name, on stream pairs, and
across the death of a worker."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from streamserve.api.generator import Generator
from streamserve.api.settings import ApiSettings
from streamserve.cli.serving import api_settings
from streamserve.execution.loading.load import load as load_model
from streamserve.llm.async_llm import AsyncLLM
from streamserve.llm.llm import LLM
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.protocol.keys import digest
from streamserve.protocol.request_options import RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta
from streamserve.text.tokenizer import Tokenizer
from tests.adapters import merge, write_adapter
from tests.api.serving import Served, served, until
from tests.checkpoints import make_checkpoint
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Task, run_alone
from tests.pairs import wait_until_idle

ADMIN = {"Authorization": "Bearer admin-key"}
GREEDY = {"temperature": 0.0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
PROMPT = "the quick brown fox jumps over the lazy dog and then the other one too"
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"a{seed}", base, rank=4, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def expected(base: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the texts of the base model, and of the base model with each adapter merged into its weights."""
    merged = [
        merge(base, adapter, tmp_path_factory.mktemp("merged") / adapter.name) for adapter in adapters[:2]
    ]
    tokenizer = Tokenizer.from_folder(base)
    texts = []
    for folder in (base, *merged):
        config = ModelConfig(
            path=str(folder), threads=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, draft="none"
        )
        tokens = run_alone(load_model(config).executor, Task(tokenizer.encode(PROMPT), PARAMS), 24)
        texts.append(tokenizer.decode(tokens))
    assert len(set(texts)) == 3
    return texts


@pytest.fixture(scope="module")
def server(base: Path, adapters: list[Path]) -> Iterator[Served]:
    settings = resolve(
        str(base),
        {
            "lora": [f"first={adapters[0]}"], "max_loras": 2, "served_model_name": ["base"], "threads": 1,
            "num_blocks": 400, "profile": False, "admin_key": ["admin-key"],
        },
        environ={},
    )  # fmt: skip
    assert settings.server.admin_key == (digest("admin-key"),)

    async def start() -> Generator:
        llm = AsyncLLM(settings)
        await llm.start()
        return llm

    api: ApiSettings = api_settings(settings, local_only=False)
    with served(start, api) as running:
        yield running


def text_of(client: openai.OpenAI, model: str) -> str:
    return client.completions.create(model=model, prompt=PROMPT, **GREEDY).choices[0].text


def load(server: Served, name: str, path: Path | str, key: dict[str, str] = ADMIN) -> Any:
    body = {"lora_name": name, "lora_path": str(path)}
    return server.http.post("/v1/load_lora_adapter", json=body, headers=key)


def unload(server: Served, name: str) -> Any:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def test_requests_choose_an_adapter_by_model(server: Served, expected: list[str]) -> None:
    assert [text_of(server.client, name) for name in ("base", "first")] == expected[:2]
    cards = {card.id: card for card in server.client.models.list()}
    assert list(cards) == ["base", "first"]
    assert cards["first"].parent == "base"
    assert cards["base"].parent is None
    assert server.client.models.retrieve("first").id == "first"
    chat = server.client.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "hi"}], **GREEDY
    )
    other = server.client.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hi"}], **GREEDY
    )
    assert chat.model == "first"
    assert chat.choices[0].message.content != other.choices[0].message.content
    assert chat.system_fingerprint != other.system_fingerprint
    with pytest.raises(openai.NotFoundError, match="'third' does not exist; this server has: base, first"):
        text_of(server.client, "third")


def test_streams_and_prompt_streams_have_the_adapter(server: Served, expected: list[str]) -> None:
    events = server.client.completions.create(model="first", prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(event.choices[0].text for event in events) == expected[1]
    body = {
        "model": "first",
        "template": "{context}",
        "temperature": 0.0,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    opened = server.post("/v1/streams", **body)
    assert opened.status_code == 200, opened.text
    stream = f"/v1/streams/{opened.json()['id']}"
    edits = [{"op": "append", "text": PROMPT[:30]}, {"op": "append", "text": PROMPT[30:]}]
    assert server.http.patch(stream, json={"version": 0, "operations": edits}).status_code == 200
    finished = server.post(f"{stream}/finish", stream=False)
    assert finished.json()["choices"][0]["text"] == expected[1]
    assert finished.json()["model"] == "first"


def test_adapters_are_loaded_and_unloaded_while_serving(
    server: Served, adapters: list[Path], expected: list[str], tmp_path: Path
) -> None:
    reply = load(server, "second", adapters[1])
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'second' added successfully.",
    )
    assert text_of(server.client, "second") == expected[2]
    assert load(server, "third", adapters[2]).status_code == 409
    assert load(server, "second", adapters[2]).status_code == 400
    assert load(server, "base", adapters[2]).status_code == 400
    assert unload(server, "third").status_code == 404
    assert unload(server, "base").status_code == 404
    assert unload(server, "second").status_code == 200
    with pytest.raises(openai.NotFoundError):
        text_of(server.client, "second")
    assert load(server, "second", tmp_path / "nowhere").status_code == 404
    refused = load(server, "second", _dora(adapters[0], tmp_path / "dora"))
    assert refused.status_code == 400
    assert "DoRA is not served" in refused.json()["error"]["message"]
    assert load(server, "second", adapters[1]).status_code == 200
    assert text_of(server.client, "second") == expected[2]
    assert unload(server, "second").status_code == 200


def _dora(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace("{", '{"use_dora": true, ', 1))
    return folder


def test_only_the_admin_key_loads_and_unloads(server: Served, adapters: list[Path]) -> None:
    assert load(server, "second", adapters[1], key={}).status_code == 401
    assert load(server, "second", adapters[1], key={"Authorization": "Bearer other"}).status_code == 401
    assert "second" not in {card.id for card in server.client.models.list()}


def test_a_restarted_worker_has_the_adapters_again_and_requests_go_on_with_theirs(
    server: Served, adapters: list[Path], expected: list[str]
) -> None:
    assert load(server, "second", adapters[1]).status_code == 200
    whole = server.client.completions.create(
        model="second", prompt=PROMPT, temperature=0.0, max_tokens=300, extra_body={"ignore_eos": True}
    )
    events = server.client.completions.create(
        model="second", prompt=PROMPT, temperature=0.0, max_tokens=300, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    text, process = "", server.llm.process_id()
    for number, event in enumerate(events):
        text += event.choices[0].text
        if number == 3:
            os.kill(process, signal.SIGKILL)
    assert text == whole.choices[0].text
    assert server.llm.process_id() != process
    until(lambda: server.llm.health().ready)
    assert [text_of(server.client, name) for name in ("base", "first", "second")] == expected
    assert unload(server, "second").status_code == 200


async def test_stream_pairs_send_the_kv_of_adapters(
    base: Path, adapters: list[Path], expected: list[str]
) -> None:
    settings = {
        "pairs": 1, "lora": [f"first={adapters[0]}", f"second={adapters[1]}"], "threads": 1,
        "num_blocks": 200, "profile": False, "draft": str(base),
    }  # fmt: skip
    llm = AsyncLLM(resolve(str(base), settings, environ={}))
    await llm.start()
    try:

        async def answer(number: int, adapter: str) -> str:
            ids = llm.tokenizer.encode(PROMPT)
            items = llm.submit(ids, PARAMS, request_id=f"r{number}", options=RequestOptions(adapter=adapter))
            return "".join([item.text async for item in items if isinstance(item, ChoiceDelta)])

        names = ["", "first", "second"]
        for _ in range(2):
            texts = await asyncio.gather(*(answer(number, names[number % 3]) for number in range(9)))
            assert texts == [expected[number % 3] for number in range(9)]
        await wait_until_idle(llm)
        report = llm.report()
        assert report is not None
        assert report.transfer is not None
        assert report.transfer.sent_bytes > 0
        assert report.transfer.handed_over >= 9
        assert report.speculation is not None
        assert report.speculation.accepted > 0
        await llm.unload_adapter("first")
        with pytest.raises(RequestError, match="does not exist"):
            await answer(99, "first")
        assert await answer(100, "second") == expected[2]
    finally:
        await llm.close()


def test_a_script_uses_adapters_by_name(base: Path, adapters: list[Path], expected: list[str]) -> None:
    with LLM(
        str(base), lora=[f"first={adapters[0]}"], max_loras=2, threads=1, num_blocks=200, profile=False
    ) as llm:
        llm.load_adapter("second", str(adapters[1]))
        outputs = llm.generate([PROMPT] * 3, PARAMS, lora=["", "first", "second"], use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == expected
        assert "".join(delta.text for delta in llm.stream(PROMPT, PARAMS, lora="first")) == expected[1]
        with pytest.raises(RequestError, match="loaded are: first, second"):
            llm.generate(PROMPT, PARAMS, lora="third")
        llm.unload_adapter("second")
        with pytest.raises(RequestError, match="loaded are: first"):
            llm.generate(PROMPT, PARAMS, lora="second")
        with pytest.raises(ValueError, match="1 prompts, but 2 LoRA adapters"):
            llm.generate(PROMPT, PARAMS, lora=["first", "first"])


def test_an_adapter_that_cannot_be_served_ends_the_start(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    folder = _dora(adapters[0], tmp_path / "dora")
    with pytest.raises(CheckpointError, match="DoRA is not served"):
        LLM(str(base), lora=[f"first={folder}"], threads=1, num_blocks=200, profile=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": ["first"]}, "lora = 'first': must be NAME=PATH"),
        ({"lora": ["=ADAPTER"]}, "a name has 1 to 256 printable characters"),
        ({"lora": ["a=ADAPTER", "a=ADAPTER"]}, "the name 'a' is in use"),
        ({"lora": ["base=ADAPTER"], "served_model_name": ["base"]}, "the name 'base' is in use"),
        ({"lora": ["a=/nowhere"]}, "there is no adapter_config.json in that folder"),
        ({"lora": ["a=ADAPTER", "b=ADAPTER"], "max_loras": 1}, "max_loras = 1: lora gives 2 adapters"),
        ({"max_lora_rank": 8}, "max_lora_rank = 8: no LoRA adapters are served: give lora or max_loras"),
        ({"lora": ["a=ADAPTER"], "task": "embed"}, "task = 'embed' generates no text"),
        ({"max_loras": 5000}, "max_loras"),
    ],
)
def test_settings_that_contradict_are_refused(
    base: Path, adapters: list[Path], settings: dict[str, Any], message: str
) -> None:
    given = {
        name: [text.replace("ADAPTER", str(adapters[0])) for text in value] if name == "lora" else value
        for name, value in settings.items()
    }
    with pytest.raises(SettingsError, match=message):
        resolve(str(base), given, environ={})
