"""Sampling parameters for scripts: those of a request, and the further arguments of vLLM's SamplingParams."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import msgspec

from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import InvalidField
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams


class RequestOutputKind(IntEnum):
    """What `AsyncLLM.generate` yields: all output so far, the new output, or the whole output once."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output; exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    `json` is a JSON schema as text or as an object, `grammar` is in Lark or llama.cpp's GBNF. The others are
    settings of JSON's whitespace. `disable_fallback` has no effect: there is one implementation.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


_NO_CODE = (
    "a worker runs no code of scripts: use logit_bias, allowed_token_ids, bad_words or structured_outputs"
)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None,), "only n outputs are generated: raise n, and choose by cumulative_logprob"),
    "use_beam_search": ((False,), "a beam is not a sample: use n, or temperature 0"),
    "logits_processors": ((None, []), _NO_CODE),
    "extra_args": ((None, {}), "there are no extensions that read it: leave it out"),
    "flat_logprobs": ((False,), "logprobs are a list of mappings: leave it out"),
    "spaces_between_special_tokens": ((True,), "the tokenizer's text is returned as it is: leave it out"),
    "repetition_detection": ((None,), "use presence_penalty, frequency_penalty or repetition_penalty"),
    "thinking_token_budget": ((None,), "use max_tokens, which limits reasoning and answer together"),
    "logprob_token_ids": ((None,), "use logprobs, which has the most likely tokens"),
}
"""Arguments of vLLM that are refused, with the values that are accepted because they change nothing, and what
to do."""


class ScriptParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sampling parameters of scripts, exported as `streamserve.SamplingParams`: the same names as vLLM's.

    Besides the fields of a request's SamplingParams:

    - `structured_outputs` (formerly `guided_decoding`): the form of the output.
    - `bad_words`: texts that the output must not contain, however they are tokenized.
    - `detokenize`: False leaves the text empty; stop strings then have no effect and are refused.
    - `truncate_prompt_tokens`: the prompt keeps only this many of its last tokens; -1: the tokens that fit in
      the context in addition to `max_tokens`.
    - `output_kind`: what `AsyncLLM.generate` yields. `LLM` returns whole outputs.

    The remaining fields are arguments of vLLM that are refused by name, except with values that change
    nothing.
    """

    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    best_of: int | None = None
    use_beam_search: bool = False
    logits_processors: Sequence[Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    flat_logprobs: bool = False
    spaces_between_special_tokens: bool = True
    repetition_detection: Any = None
    thinking_token_budget: int | None = None
    logprob_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Raise InvalidField for the first field that is out of range, refused, or contradicts another."""
        super().__post_init__()
        for name, (accepted, way_on) in _REFUSED.items():
            value = getattr(self, name)
            if value not in accepted and not (name == "best_of" and value == self.n):
                raise InvalidField(name, f"is not supported: {way_on}")
        if not self.detokenize and self.stop:
            raise InvalidField("detokenize", "must be true for stop strings: leave one of the two out")
        limit = self.truncate_prompt_tokens
        if limit is not None and (type(limit) is not int or (limit != -1 and limit < 1)):
            raise InvalidField("truncate_prompt_tokens", f"must be -1, or at least 1, got {limit!r}")
        grammar = self._requested_grammar()
        if grammar is not None:
            msgspec.structs.force_setattr(self, "grammar", grammar)

    def _requested_grammar(self) -> Grammar | None:
        """Return the grammar of the output format. Raises InvalidField if there are several formats, or for
        one that cannot be used."""
        named = ("structured_outputs", "guided_decoding", "bad_words")
        requested = [name for name in named if getattr(self, name)]
        if not requested:
            return None
        grammar = _grammar(requested[0], getattr(self, requested[0]))
        if self.grammar not in (None, grammar):
            requested.append("grammar")
        if len(requested) > 1:
            raise InvalidField(requested[1], f"cannot be combined with {requested[0]}: give only one format")
        return grammar


def _grammar(name: str, value: Any) -> Grammar:
    from streamserve.text.structured import structured_grammar, without_words  # imports llguidance

    try:
        if name == "bad_words":
            return without_words([value] if isinstance(value, str) else list(value))
        settings = asdict(value) if isinstance(value, StructuredOutputsParams) else dict(value)
        settings.pop("disable_fallback", None)
        return structured_grammar(name, settings)
    except RequestError as error:
        entry, _, reason = error.message.removeprefix(name).partition(" ")
        raise InvalidField(name, reason, entry) from error


def request_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters of the request that a script's parameters ask for."""
    if not isinstance(params, ScriptParams):
        return params
    return SamplingParams(**{name: getattr(params, name) for name in SamplingParams.__struct_fields__})
