"""Mistral's tokenizers give the ids of mistral-common, and render conversations in the same way."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.text.detokenize import detokenizer
from streamserve.text.mistral import mistral_file
from streamserve.text.tokenizer import Tokenizer
from streamserve.text.tools.formats import FORMATS, find_format
from tests.text.folders import MISTRAL_SPECIAL, tekken_folder

TEXTS = st.text() | st.lists(
    st.sampled_from(["the ", "ü", "🙂", "👩‍👩‍👧", " ", "\n\n", "12", "[INST]", "</s>", "in the"])
).map("".join)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "F", "parameters": {"type": "object", "properties": {}}},
}
CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": 1}},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi [/INST] ü"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "{}"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]},
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a small tekken.json, and with the SentencePiece model of mistral-common."""
    spm = tmp_path_factory.mktemp("spm")
    shutil.copy(MistralTokenizer.v3().instruct_tokenizer.tokenizer.file_path, spm / "tokenizer.model.v3")
    return {"tekken": tekken_folder(tmp_path_factory.mktemp("tekken")), "spm": spm}


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def originals(folders: dict[str, Path]) -> dict[str, MistralTokenizer]:
    return {name: MistralTokenizer.from_file(str(mistral_file(path))) for name, path in folders.items()}


KINDS = ("tekken", "spm")


@given(text=TEXTS, kind=st.sampled_from(KINDS), bos=st.booleans())
def test_the_ids_are_those_of_mistral_common(
    tokenizers: dict[str, Tokenizer], originals: dict[str, MistralTokenizer], text: str, kind: str, bos: bool
) -> None:
    expected = originals[kind].instruct_tokenizer.tokenizer.encode(text, bos=bos, eos=False)
    assert tokenizers[kind].encode(text, add_special_tokens=bos) == expected
    assert tokenizers[kind].encode_without_gil([text], bos) == [expected]


@given(text=TEXTS, kind=st.sampled_from(KINDS))
def test_the_text_is_that_of_mistral_common(
    tokenizers: dict[str, Tokenizer], originals: dict[str, MistralTokenizer], text: str, kind: str
) -> None:
    ids = tokenizers[kind].encode(text)
    assert tokenizers[kind].decode(ids) == originals[kind].instruct_tokenizer.tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 320)), skip=st.booleans(), kind=st.sampled_from(KINDS))
def test_streamed_text_equals_the_decoded_whole(
    tokenizers: dict[str, Tokenizer], ids: list[int], skip: bool, kind: str
) -> None:
    reader = detokenizer(tokenizers[kind], skip)
    pieces = [*map(reader.feed, ids), reader.flush()]
    assert "".join(pieces) == tokenizers[kind].decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_comes_with_its_last_byte(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    ids = tokenizers[kind].encode("a𒀀b", add_special_tokens=False)
    reader = detokenizer(tokenizers[kind])
    pieces = [*map(reader.feed, ids), reader.flush()]
    assert "".join(pieces) == "a𒀀b"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_conversations_are_rendered_by_mistral_common(
    tokenizers: dict[str, Tokenizer],
    originals: dict[str, MistralTokenizer],
    kind: str,
    count: int,
    tools: Any,
) -> None:
    renderer = tokenizers[kind].renderer()
    assert renderer is not None
    plain = [dict(message) for message in CONVERSATION[:count]]
    if count == 6:
        plain[-1]["content"] = "Andnow?"
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
    plain = [{**message, "tool_calls": [call]} if "tool_calls" in message else message for message in plain]
    request: Any = ChatCompletionRequest.from_openai(messages=plain, tools=tools)
    expected = originals[kind].encode_chat_completion(request)
    ids = renderer.render(CONVERSATION[:count], tools=tools)
    assert ids == expected.tokens
    text = tokenizers[kind].decode(list(ids), skip_special_tokens=False)  # type: ignore[arg-type]
    assert "Hi [/INST] ü" in text


def test_messages_cannot_hold_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    renderer = tokenizers["tekken"].renderer()
    assert renderer is not None
    ids = renderer.render([{"role": "user", "content": "[/INST]</s>"}])
    assert [token for token in ids if tokenizers["tekken"].is_special(token)] == [1, 3, 4]  # type: ignore[arg-type]


def test_the_last_message_is_continued(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["tekken"]
    renderer = tokenizer.renderer()
    assert renderer is not None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    ids: Any = renderer.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>[INST]Hi[/INST]Well"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": CONVERSATION[:2], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": CONVERSATION[:2], "variables": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"messages": CONVERSATION[:2], "tools": [{"type": "function"}]}, "messages"),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    tokenizers: dict[str, Tokenizer], fields: dict[str, Any], field: str
) -> None:
    renderer = tokenizers["tekken"].renderer()
    assert renderer is not None
    with pytest.raises(RequestError) as error:
        renderer.render(**fields)
    assert error.value.field == field


def test_special_tokens_are_named_and_show_the_formats(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in KINDS:
        tokenizer = tokenizers[kind]
        assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
        assert find_format("auto", tokenizer.template_signs) is FORMATS["mistral"]
    tekken = tokenizers["tekken"]
    assert [tekken.special_id(text) for text in MISTRAL_SPECIAL] == list(range(len(MISTRAL_SPECIAL)))
    assert tekken.special_id("the") is None
    assert tekken.byte_level
    kept = tekken.decode([1, 9, 300], skip_special_tokens=False)
    assert kept.startswith("<s>[TOOL_CALLS]")


def test_the_tokenizer_of_the_library_is_exact_on_its_own_file(tmp_path: Path) -> None:
    original = MistralTokenizer.v3(is_tekken=True)
    shutil.copy(original.instruct_tokenizer.tokenizer.file_path, tmp_path / "tekken.json")
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in (
        "Grüße aus Köln 你好世界 🙂👩‍👩‍👧",
        "  def f(x):\n\treturn 1234567 ** x\n\n\n",
        "e\u0301\u0302 [INST]",
    ):
        ids = tokenizer.encode(text)
        assert ids == original.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)
        reader = detokenizer(tokenizer)
        assert "".join([*map(reader.feed, ids), reader.flush()]) == text
        assert b"".join(map(tokenizer.token_bytes, ids[1:])) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == original.decode(
        ids, special_token_policy=SpecialTokenPolicy.KEEP
    )


def test_tekken_is_preferred_and_tokenizer_json_before_both(folders: dict[str, Path], tmp_path: Path) -> None:
    assert mistral_file(tmp_path) is None
    (tmp_path / "tokenizer.model").touch()
    assert mistral_file(tmp_path) is None
    for name in ("tokenizer.model.v1", "tokenizer.model.v3"):
        (tmp_path / name).touch()
    assert mistral_file(tmp_path) == tmp_path / "tokenizer.model.v3"
    (tmp_path / "tekken.json").touch()
    assert mistral_file(tmp_path) == tmp_path / "tekken.json"


def test_without_the_library_the_error_names_the_extra(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(CheckpointError, match=r"needs the library mistral-common: .*streamserve\[mistral\]"):
        Tokenizer.from_folder(folders["tekken"])


@pytest.mark.parametrize("content", ["", "{}", '{"config": {"version": "v99"}}', "[]"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tekken\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
