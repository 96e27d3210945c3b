"""Errors name their field: errors of this package in an attribute, errors of msgspec through the single
parser of its messages."""

from typing import Any, Literal

import msgspec
import pytest

from streamserve.protocol.field_errors import InvalidField, InvalidFieldType, field_of, mismatch_of
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import Pooling, SamplingParams, Slo, SpeculationLimits, check_sampling


class Inner(msgspec.Struct):
    role: str
    kind: Literal["a", "b"] = "a"


class Outer(msgspec.Struct):
    n: int
    bias: dict[int, float] = {}
    messages: list[Inner] = []
    params: SamplingParams | None = None


@pytest.mark.parametrize(
    ("content", "reason", "path", "field"),
    [
        ({"n": "x"}, "Expected `int`, got `str`", "n", "n"),
        ({"n": 1, "bias": {1: "x"}}, "Expected `float`, got `str`", "bias[...]", "bias"),
        ({"n": 1, "bias": {"a": 1.0}}, "Expected `int`, got `str`", "bias", "bias"),
        ({"n": 1, "messages": [{"role": 2}]}, "Expected `str`, got `int`", "messages[0].role", "messages"),
        ({"n": 1, "messages": [{}]}, "Object missing required field `role`", "messages[0]", "messages"),
        ({"n": 1, "params": {"top_p": 2}}, "top_p must be between 0 and 1, got 2.0", "params", "params"),
        (
            {"n": 1, "messages": [{"role": "x", "kind": "c - at `$.n`"}]},
            "Invalid enum value 'c - at `$.n`'",
            "messages[0].kind",
            "messages",
        ),
    ],
)
def test_where_msgspec_found_a_mismatch(content: Any, reason: str, path: str, field: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(content, Outer)
    mismatch = mismatch_of(refused.value)
    assert (mismatch.reason, mismatch.path, mismatch.field) == (reason, path, field)
    assert not mismatch.missing
    assert mismatch.text == str(refused.value)


def test_a_missing_field_and_a_field_of_the_whole_are_named() -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({}, Outer)
    mismatch = mismatch_of(refused.value)
    assert (mismatch.field, mismatch.missing) == ("n", True)
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"top_p": 2}, SamplingParams)
    mismatch = mismatch_of(refused.value)
    assert (mismatch.field, mismatch.missing, mismatch.path) == ("top_p", False, "")
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(1, Outer)
    assert mismatch_of(refused.value).field is None


INVALID: dict[str, list[dict[str, Any]]] = {
    "n": [{"n": 0}, {"n": 1.5}, {"n": "x"}],
    "temperature": [{"temperature": 1e-4}, {"temperature": float("nan")}],
    "top_p": [{"top_p": 0.0}, {"top_p": 2}],
    "seed": [{"seed": -1}],
    "min_tokens": [{"min_tokens": 3, "max_tokens": 2}],
    "logit_bias": [{"logit_bias": {5: 200}}, {"logit_bias": {5: "x"}}, {"logit_bias": {99: 1}}],
    "stop": [{"stop": [""]}, {"stop": ["a"] * 65}, {"stop": "\ud800"}, {"stop": 5}],
    "stop_token_ids": [{"stop_token_ids": [99]}, {"stop_token_ids": [1] * 1025}],
    "allowed_token_ids": [
        {"allowed_token_ids": [99]},
        {"allowed_token_ids": [3], "min_tokens": 1},
        {"allowed_token_ids": [1], "grammar": Grammar(kind="regex", text="a")},
    ],
    "grammar": [{"grammar": Grammar(kind="json", text="{")}],
    "pooling": [{"pooling": Pooling()}, {"pooling": Pooling(kind="mean", tokens=(1,)), "max_tokens": 0}],
    "slo": [{"slo": 5}],
    "slo.tpot_ms": [{"slo": Slo(tpot_ms=0.0)}],
    "speculation.max_depth": [{"speculation": SpeculationLimits(max_depth=0)}],
}


@pytest.mark.parametrize(
    ("field", "values"), [(name, each) for name, cases in INVALID.items() for each in cases]
)
def test_sampling_errors_carry_their_field(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as refused:
        check_sampling(SamplingParams(**values), 10, (3,))
    assert refused.value.field == field
    assert str(refused.value) == refused.value.message(field), "the message begins with the field"
    assert refused.value.message("other").startswith("other")


def test_an_error_about_an_entry_names_the_field_and_the_entry() -> None:
    error = InvalidFieldType("logit_bias", "must be a number", "[5]")
    assert isinstance(error, TypeError)
    assert isinstance(error, ValueError)
    assert (error.field, str(error)) == ("logit_bias", "logit_bias[5] must be a number")
    assert error.message("bias") == "bias[5] must be a number"


@pytest.mark.parametrize("path", ["messages", "messages[0]", "messages[0].content", "messages.x[0]"])
def test_the_field_of_a_path(path: str) -> None:
    assert field_of(path) == "messages"
