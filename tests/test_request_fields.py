"""A request that AsyncLLM refuses gets an error that names the field, also if msgspec found a wrong type."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams, SpeculationLimits
from tests.engine.drive import model_info

LLM: Any = SimpleNamespace(model=model_info(64), _check_served=lambda params: None)


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"stop_token_ids": (4000,)}, "stop_token_ids", "stop_token_ids contains 4000, but the vocabulary"),
        ({"logit_bias": {4000: 1.0}}, "logit_bias", "logit_bias contains 4000"),
        ({"max_tokens": 5000}, "max_tokens", "max_tokens is 5000, but after a prompt of 1"),
        ({"ignore_eos": "yes"}, "ignore_eos", "Expected `bool`, got `str` - at `$.ignore_eos`"),
        ({"stop_token_ids": ("x",)}, "stop_token_ids", "Expected `int`, got `str`"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias", "Expected `int`, got `str`"),
        ({"ignore_eos": object()}, "ignore_eos", "Expected `bool`, got `object` - at `$.ignore_eos`"),
        (
            {"grammar": Grammar(kind="xml", text="")},
            "grammar",
            "Invalid enum value 'xml' - at `$.grammar.kind`",
        ),
        (
            {"speculation": SpeculationLimits(enabled="yes")},
            "speculation",
            "Expected `bool`, got `str` - at `$.speculation.enabled`",
        ),
    ],
)
def test_refused_parameters_are_named(values: dict[str, Any], field: str | None, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        AsyncLLM.complete(LLM, [1], SamplingParams(**values))
    assert refused.value.field == field
    assert refused.value.message.startswith(message)
