"""Tokenizer settings of a Hugging Face folder: special tokens, chat template, tokenizer class."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamserve.protocol.errors import CheckpointError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_LLAMA_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class TokenizerFolder:
    """The settings besides `tokenizer.json`. `special_tokens` maps names ("eos_token", …) to texts.

    `chat_template` is the template named default, `tool_template` the template named tool_use, which renders
    conversations with tools.

    `llama_class`: transformers loads the folder with its class `LlamaTokenizer`. `legacy` and
    `add_prefix_space` are settings of this class.
    """

    path: Path
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None
    llama_class: bool
    legacy: bool
    add_prefix_space: bool

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"


def read_folder(path: Path) -> TokenizerFolder:
    """Read the settings in `path`.

    Raises CheckpointError if it is not a folder, or if a file in it is not JSON.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    if not any(path.iterdir()):
        raise CheckpointError(f"{path} is empty; give the folder that holds config.json")
    settings = _read_json(path / "tokenizer_config.json")
    model_type = _read_json(path / "config.json").get("model_type")
    llama_class = model_type == "llama" and settings.get("tokenizer_class") in _LLAMA_CLASSES
    prefix_space = settings.get("add_prefix_space")
    templates = _chat_templates(path, settings)
    return TokenizerFolder(
        path=path,
        special_tokens=_special_tokens(path, settings, _LLAMA_DEFAULTS if llama_class else {}),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        llama_class=llama_class,
        legacy=bool(settings.get("legacy", False)),
        add_prefix_space=True if prefix_space is None else bool(prefix_space),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{file} is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return content


def _special_tokens(path: Path, settings: dict[str, Any], defaults: dict[str, str]) -> dict[str, str]:
    """Return the named special tokens. Older folders have them in a separate file."""
    older = {} if "added_tokens_decoder" in settings else _read_json(path / "special_tokens_map.json")
    named = {}
    for name in _NAMED_TOKENS:
        value = older[name] if name in older else settings.get(name, defaults.get(name))
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name, from the files `chat_template.jinja` ("default") and
    `additional_chat_templates/NAME.jinja`. Without `chat_template.jinja`, the templates in
    `tokenizer_config.json` are read, too."""
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    named = {name: _read_text(file) for name, file in files.items()}
    default = path / "chat_template.jinja"
    if default.exists():
        return {**named, "default": _read_text(default)}
    template = settings.get("chat_template")
    listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
    given = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}
    for name in ("default", "tool_use"):
        text = given.get(name)
        if not isinstance(text, str | None):
            raise CheckpointError(f"{path / 'tokenizer_config.json'}: chat_template must be text")
        if text is not None:
            named.setdefault(name, text)
    return named


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
