"""Sampling parameters are checked once, and errors name the wrong parameter."""

import math

import msgspec
import pytest

from streamserve.protocol.sampling import INTEGERS, SamplingParams, Slo, SpeculationLimits, check_sampling

NAN = float("nan")
BAD: list[tuple[str, object]] = [
    ("n", 0), ("n", 1000),
    ("temperature", -0.1), ("temperature", NAN), ("temperature", 1e-9),
    ("top_k", -2), ("top_k", 10**400), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1),
    ("presence_penalty", 3.0), ("frequency_penalty", NAN), ("repetition_penalty", 0.0),
    ("seed", -1), ("seed", 2**64),
    ("max_tokens", -1), ("min_tokens", 17),
    ("logprobs", 65), ("prompt_logprobs", -1),
    ("stop", ("",)), ("stop", ("a",) * 65), ("stop", ("\ud800",)), ("stop_token_ids", (100,)),
    ("logit_bias", {100: 1.0}), ("logit_bias", {1: 101.0}),
    ("allowed_token_ids", (100,)), ("allowed_token_ids", (1,) * 20_000),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        check_sampling(SamplingParams(**{field: value}), vocab_size=100)


OF_A_VOCABULARY = ("stop_token_ids", "allowed_token_ids")


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_value_that_no_vocabulary_allows_is_refused_at_once(field: str, value: object) -> None:
    if field in OF_A_VOCABULARY or value == {100: 1.0}:
        SamplingParams(**{field: value})
        return
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
    with pytest.raises(ValueError, match=field):
        msgspec.structs.replace(SamplingParams(), **{field: value})


def test_a_text_is_no_number() -> None:
    with pytest.raises(TypeError, match="temperature must be a number, got 'hot'"):
        SamplingParams(temperature="hot")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 1.0])
def test_a_number_with_a_fraction_is_no_integer(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be an integer, got {value}"):
        SamplingParams(**{field: value})
    with pytest.raises(ValueError, match=r"speculation.max_depth must be an integer, got 2.0"):
        SamplingParams(speculation=SpeculationLimits(max_depth=2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("slo", {"tpot_ms": 20.0}, "a Slo"),
        ("speculation", {"enabled": False}, "a SpeculationLimits"),
        ("logit_bias", [1.0], "a dict"),
        ("stop", 5, "a list"),
    ],
)
def test_a_value_of_another_type_is_named(field: str, value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"{field} must be {kind}, got "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_what_a_client_forges_is_refused_when_it_is_decoded() -> None:
    forged = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(msgspec.ValidationError, match="temperature must be between"):
        msgspec.msgpack.decode(forged, type=SamplingParams)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_k=-1, max_tokens=None, min_tokens=4000),
        SamplingParams(
            n=4, seed=2**64 - 1, logit_bias={0: -100, 99: 100}, stop=("\n",), stop_token_ids=(99,)
        ),
    ],
)
def test_good_ones_pass(params: SamplingParams) -> None:
    check_sampling(params, vocab_size=100)
    assert params.greedy == (params.temperature == 0)


@pytest.mark.parametrize("name", ["tpot_ms", "ttft_ms"])
@pytest.mark.parametrize("target", [0.0, -1.0, NAN, math.inf])
def test_latency_targets_are_positive_and_finite(name: str, target: float) -> None:
    with pytest.raises(ValueError, match=f"slo.{name} must be above 0"):
        check_sampling(SamplingParams(slo=Slo(**{name: target})), vocab_size=100)
    check_sampling(SamplingParams(slo=Slo(**{name: 0.5})), vocab_size=100)


def test_allowed_tokens_must_leave_a_way_to_min_tokens() -> None:
    params = SamplingParams(allowed_token_ids=(2, 3), stop_token_ids=(3,), min_tokens=1)
    check_sampling(params, 100)
    check_sampling(msgspec.structs.replace(params, ignore_eos=True), 100, eos_token_ids=(2,))
    check_sampling(msgspec.structs.replace(params, min_tokens=0), 100, eos_token_ids=(2,))
    with pytest.raises(ValueError, match="allowed_token_ids contains only tokens that end the text"):
        check_sampling(params, 100, eos_token_ids=(2,))


def test_stops_may_be_given_as_other_libraries_take_them() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], logit_bias=None, allowed_token_ids=None)
    assert params == SamplingParams(stop=("end",), stop_token_ids=(3, 4))
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
