"""The scripted checkpoint generates its replies, in pieces that depend on the seed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripted_checkpoint import Reply, make_scripted

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>'
REPLIES = (
    Reply("one", f"I call. {CALL}"),
    Reply("two", "It is done. It is done. It is done."),
    Reply("three", "on and on, ", tooled=False, endless=True),
    Reply("", "Nothing.", tooled=False),
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def written(folder: Path, messages: list[dict[str, str]], tools: bool = True, tokens: int = 80) -> str:
    """Return the text that transformers' model generates greedily."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        messages, tools=TOOLS if tools else None, add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    with torch.no_grad():
        output = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scripted(tmp_path_factory.mktemp("scripted"), REPLIES, seed=1)


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        (["please: one, in many words"], True, REPLIES[0].text),
        (["one"], False, "Nothing."),
        (["one", "two"], True, REPLIES[1].text),
        (["one", "I call", "result"], True, "Nothing."),
        (["one", "two", "result"], True, REPLIES[1].text),
        (["three"], False, "on and on, on and on, on"),
    ],
)
def test_the_last_cue_since_the_assistants_last_message_decides(
    folder: Path, messages: list[str], tools: bool, expected: str
) -> None:
    roles = ("user", "assistant", "tool")
    chat = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    if chat[-1]["role"] == "assistant":
        chat.append({"role": "tool", "content": "a result"})
    found = written(folder, chat, tools)
    assert found.startswith(expected)
    assert found == expected or "on and on" in expected


def test_pieces_depend_on_the_seed_and_no_prompt_has_them(folder: Path, tmp_path: Path) -> None:
    vocabularies = [
        set(json.loads((made / "tokenizer.json").read_bytes())["model"]["vocab"])
        for made in (
            folder,
            make_scripted(tmp_path / "same", REPLIES, 1),
            make_scripted(tmp_path / "b", REPLIES, 2),
        )
    ]
    assert vocabularies[0] == vocabularies[1] != vocabularies[2]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.encode(REPLIES[0].text)) == len(REPLIES[0].text.encode())


def test_replies_need_different_texts(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the text"):
        make_scripted(tmp_path, [Reply("a", "word"), Reply("b", "word"), Reply("", "word")])
