"""The core's table of fields that only the Responses API obeys is complete."""

from msgspec.structs import fields

from streamserve.api.openai.other_fields import OBEYED_IN_RESPONSES, WITHOUT_EFFECT, default_of
from streamserve.api.openai.schemas import ChatRequest, CompletionRequest
from streamserve.extras.responses.response_schemas import ResponseRequest


def test_the_table_has_the_fields_that_no_other_route_obeys() -> None:
    elsewhere = {
        field.name: default_of(field) for kind in (CompletionRequest, ChatRequest) for field in fields(kind)
    }
    own = {
        field.name: default_of(field)
        for field in fields(ResponseRequest)
        if elsewhere.get(field.name) != default_of(field) and field.name not in WITHOUT_EFFECT
    }
    assert own == OBEYED_IN_RESPONSES
