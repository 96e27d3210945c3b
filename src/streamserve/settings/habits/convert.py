"""Conversions of other programs' values to settings."""

import json
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from streamserve.settings.habits.habit import Convert, Meaning, Refusal
from streamserve.settings.options import options

_WORDS = {
    "true": True,
    "on": True,
    "yes": True,
    "1": True,
    "false": False,
    "off": False,
    "no": False,
    "0": False,
}
_AUTOMATIC = (None, "", "auto", "-1", -1)


def to(setting: str) -> Convert:
    """Return the conversion of a value that is the same here."""
    return lambda value, given: Meaning({setting: value})


def to_list(setting: str) -> Convert:
    """Return the conversion of one or several texts to a list."""
    return lambda value, given: Meaning({setting: _listed(value)})


def negated(setting: str) -> Convert:
    """Return the conversion of a switch that turns `setting` off."""
    return lambda value, given: Meaning({setting: not is_on(value)})


def fixed(value_of: Mapping[str, Any]) -> Convert:
    """Return the conversion of a switch that stands for settings."""
    return lambda value, given: Meaning(value_of if is_on(value) else {})


def unless_automatic(setting: str) -> Convert:
    """Return the conversion of a number of which some values mean the default: -1, 0, auto."""
    automatic = (*_AUTOMATIC, "0", 0)
    return lambda value, given: Meaning({setting: _default(setting) if value in automatic else value})


def _default(setting: str) -> Any:
    """Return the default of a setting. A value that stands for it replaces other values of the setting, from
    sources of lower precedence."""
    return next(option.default for option in options() if option.name == setting)


def one_of(setting: str, values: Mapping[str, str], way_on: str = "") -> Convert:
    """Return the conversion of a text with other `values` here. Texts that are not among them are values of
    the setting itself, or refused with `way_on` if it is not empty."""

    def convert(value: Any, given: Mapping[str, Any]) -> Meaning:
        text = str(value).removeprefix("torch.")
        if text not in values and way_on:
            raise Refusal(way_on)
        return Meaning({setting: values.get(text, value if text == str(value) else text)})

    return convert


def refused_values(setting: str, values: Mapping[str, str]) -> Convert:
    """Return the conversion of a setting of which some values of other programs are refused, each with what
    to use."""

    def convert(value: Any, given: Mapping[str, Any]) -> Meaning:
        if isinstance(value, str) and value in values:
            raise Refusal(values[value])
        return Meaning({setting: value})

    return convert


def is_on(value: Any) -> bool:
    """Return whether a switch is on. Raises Refusal for a value that is no switch."""
    known = value if isinstance(value, bool) else _WORDS.get(str(value).lower())
    if known is None:
        raise Refusal("must be true or false")
    return known


def length(value: Any, given: Mapping[str, Any]) -> Meaning:
    """Convert a context length: -1, 0 and auto are the model's own; vLLM has 16k for 16,000 and 16K for
    16,384."""
    if value in (*_AUTOMATIC, "0", 0):
        return Meaning({"max_model_len": _default("max_model_len")})
    if isinstance(value, str) and value[:-1].isdecimal() and value[-1] in "kK":
        return Meaning({"max_model_len": int(value[:-1]) * (1000 if value[-1] == "k" else 1024)})
    return Meaning({"max_model_len": value})


def gpu_layers(value: Any, given: ChainMap[str, Any]) -> Meaning:
    """Convert a number of layers on the GPU: with 0, the model runs on the CPU."""
    if str(value) == "0" and "device" not in given.maps[0]:
        return Meaning({"device": "cpu"})
    return Meaning(idle=("the whole model is on the GPU if there is one: see {device}",))


def adapters(value: Any, given: Mapping[str, Any]) -> Meaning:
    """Convert LoRA adapters: NAME=PATH, or an object with a name and a path, or a list of them.

    Raises Refusal for an object that lacks one of the two.
    """
    paths: list[str] = []
    for item in _parts(value):
        parsed = _parsed(item)
        if isinstance(parsed, Mapping):
            name, path = (parsed.get(key) or parsed.get(f"lora_{key}") for key in ("name", "path"))
            if not name or not path:
                raise Refusal("an adapter must have a name and a path: {lora=NAME=PATH}")
            item = f"{name}={path}"
        paths.append(str(item))
    return Meaning({"lora": paths})


def enabled_adapters(value: Any, given: Mapping[str, Any]) -> Meaning:
    """Convert vLLM's switch for LoRA: one adapter can be loaded unless the number or the adapters are
    given."""
    named = {"lora", "lora_modules", "max_loras", "--lora", "--lora-modules"}.intersection(given)
    return Meaning({} if named or not is_on(value) else {"max_loras": 1})


_DRAFTERS = {"ngram": "ngram", "[ngram]": "ngram", "NGRAM": "ngram", "ngram_gpu": "ngram"}
_IDLE_OF_DRAFTERS = {
    "num_speculative_tokens": "the policy chooses the number of draft tokens in each step: "
    "{speculation_policy=fixed:5} drafts 5",
    "prompt_lookup_max": "the n-gram drafter chooses the length of a match",
    "prompt_lookup_min": "the n-gram drafter chooses the length of a match",
    "max_model_len": "a draft model has the context of its target",
}
_UNSUPPORTED_DRAFTER = (
    "drafters are a small model with the same tokenizer ({draft=FOLDER}), {draft=ngram}, or the model's own "
    "first layers ({draft=self:4})"
)


def speculation(value: Any, given: Mapping[str, Any]) -> Meaning:
    """Convert vLLM's JSON object of a speculation method. Raises Refusal for other drafters."""
    config = _parsed(value)
    if not isinstance(config, Mapping):
        raise Refusal("must be a JSON object: give {draft}")
    config = {name: each for name, each in config.items() if each is not None}
    method, model = config.pop("method", None), config.pop("model", None)
    draft = _DRAFTERS.get(str(method or model), model)
    if draft is None or method not in (None, "draft_model", *_DRAFTERS):
        raise Refusal(_UNSUPPORTED_DRAFTER)
    if config.get("draft_tensor_parallel_size") == 1:
        del config["draft_tensor_parallel_size"]
    unknown = [name for name in config if name not in _IDLE_OF_DRAFTERS]
    if unknown:
        raise Refusal(f"its entry {unknown[0]} is not supported: give {{draft={draft}}} instead")
    idle = (f"its entry {name} has no effect: {_IDLE_OF_DRAFTERS[name]}" for name in config)
    return Meaning({"draft": draft}, tuple(idle))


def drafter(value: Any, given: Mapping[str, Any]) -> Meaning:
    """Convert a drafter. A number is llama.cpp's: the number of draft tokens."""
    text = str(value)
    if text.isdigit():
        raise Refusal(
            f"{{draft}} is the drafter here; {{speculation_policy=fixed:{text}}} drafts {text} tokens"
        )
    return Meaning({"draft": _DRAFTERS.get(text, value)})


def origins(value: Any, given: Mapping[str, Any]) -> Meaning:
    """Convert a list of origins, which vLLM takes as JSON."""
    return Meaning({"cors_origin": _listed(_parsed(value))})


def runner(value: Any, given: ChainMap[str, Any]) -> Meaning:
    """Convert vLLM's runner. What else is given may say of a pooling runner that it scores."""
    if value != "pooling":
        return Meaning({"task": value})
    tasks = ("task", "--task", "hf_overrides", "--hf-overrides")
    named = any(given.maps[0].get(name) not in (None, {}, "{}") for name in tasks)
    return Meaning({} if named or given.get("task") == "score" else {"task": "embed"})


def reranker(value: Any, given: Mapping[str, Any]) -> Meaning:
    """Convert the overrides with which vLLM serves Qwen3-Reranker. Raises Refusal for others."""
    overrides = _parsed(value)
    if isinstance(overrides, Mapping) and overrides.get("classifier_from_token") == ["no", "yes"]:
        return Meaning({"task": "score"})
    raise Refusal("config.json is not overridden: change it in a copy of the model's folder")


def _parsed(value: Any) -> Any:
    """Return the value of a JSON object or list; other values as they are. Raises Refusal if it cannot be
    read."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        if value in _DRAFTERS:
            return value
        raise Refusal(f"is not JSON: {error}") from error


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _listed(value: Any) -> list[str]:
    return [str(part) for part in _parts(value)]
