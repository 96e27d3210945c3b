"""SamplingParams of scripts: each argument of vLLM is taken, or refused by name with what to do."""

import json
from typing import Any

import msgspec
import pytest

from streamserve import Grammar, RequestOutputKind, SamplingParams, StructuredOutputsParams
from streamserve.llm.params import request_params
from streamserve.llm.requests import truncated
from streamserve.protocol import sampling
from streamserve.protocol.field_errors import InvalidField

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("structured", "kind", "text"),
    [
        (StructuredOutputsParams(json=SCHEMA), "json", json.dumps(SCHEMA)),
        (StructuredOutputsParams(json=json.dumps(SCHEMA)), "json", json.dumps(SCHEMA)),
        (StructuredOutputsParams(json_object=True), "json", '{"type": "object"}'),
        (StructuredOutputsParams(regex="a+"), "regex", "a+"),
        (StructuredOutputsParams(choice=["yes", "no"]), "choice", '["yes", "no"]'),
        (StructuredOutputsParams(grammar='start: "a"'), "lark", 'start: "a"'),
        ({"regex": "a+"}, "regex", "a+"),
        (StructuredOutputsParams(regex="a+", disable_fallback=True), "regex", "a+"),
    ],
)
def test_a_structured_output_is_the_grammar_of_the_request(
    structured: StructuredOutputsParams, kind: str, text: str
) -> None:
    for name in ("structured_outputs", "guided_decoding"):
        arguments: dict[str, Any] = {name: structured}
        params = SamplingParams(**arguments, max_tokens=5)
        assert params.grammar is not None
        assert (params.grammar.kind, params.grammar.text) == (kind, text)
        assert request_params(params) == sampling.SamplingParams(grammar=params.grammar, max_tokens=5)
        assert msgspec.structs.replace(params, max_tokens=6).grammar == params.grammar


def test_a_request_has_none_of_the_arguments_of_scripts() -> None:
    plain = sampling.SamplingParams(temperature=0.5, seed=3)
    params = SamplingParams(temperature=0.5, seed=3, detokenize=False, truncate_prompt_tokens=4)
    assert request_params(params) == plain
    assert request_params(plain) is plain


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"best_of": 2}, "best_of is not supported: only n outputs are generated: raise n"),
        ({"use_beam_search": True}, "use_beam_search is not supported: .*: use n, or temperature 0"),
        ({"logits_processors": [print]}, "logits_processors is not supported: .* use logit_bias"),
        ({"extra_args": {"a": 1}}, "extra_args is not supported: .*: leave it out"),
        ({"flat_logprobs": True}, "flat_logprobs is not supported: .*: leave it out"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens is not .*: leave it out"),
        ({"repetition_detection": {}}, "repetition_detection is not supported: use presence_penalty"),
        ({"thinking_token_budget": 5}, "thinking_token_budget is not supported: use max_tokens"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids is not supported: use logprobs"),
        ({"detokenize": False, "stop": "x"}, "detokenize must be true for stop strings: leave one of the"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1, or at least 1, got 0"),
        ({"bad_words": [""]}, "bad_words must not contain an empty text"),
        (
            {"bad_words": ["a"], "structured_outputs": {"regex": "b"}},
            "bad_words cannot be combined with structured_outputs: give only one format",
        ),
        (
            {"structured_outputs": {"regex": "b"}, "grammar": Grammar(kind="regex", text="a")},
            "grammar cannot be combined with structured_outputs: give only one format",
        ),
        ({"structured_outputs": {"regex": "b", "choice": ["a"]}}, "structured_outputs must hold exactly one"),
        (
            {"structured_outputs": StructuredOutputsParams(structural_tag="{}")},
            "structured_outputs.structural_tag is not supported: use json, regex, choice, grammar",
        ),
    ],
)
def test_an_argument_is_refused_by_name_with_what_to_do(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidField, match=error):
        SamplingParams(**arguments)


def test_values_that_change_nothing_are_taken() -> None:
    params = SamplingParams(
        n=2, best_of=2, use_beam_search=False, logits_processors=[], extra_args={}, flat_logprobs=False,
        spaces_between_special_tokens=True, bad_words=[], output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    assert request_params(params) == sampling.SamplingParams(n=2)


@pytest.mark.parametrize(("limit", "kept"), [(None, 10), (4, 4), (12, 10), (-1, 7)])
def test_a_prompt_keeps_its_last_tokens(limit: int | None, kept: int) -> None:
    params = SamplingParams(truncate_prompt_tokens=limit, max_tokens=5)
    assert truncated(list(range(10)), params, max_model_len=12) == list(range(10))[10 - kept :]
