"""Fields of other servers and of other routes that /v1/responses knows and does not obey."""

from streamserve.api.http.ignored_fields import OtherFields
from streamserve.api.openai.other_fields import (
    INSTEAD,
    REFUSED,
    REFUSED_IN_CHATS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_IN_CHATS,
    obeyed_elsewhere,
    without,
)
from streamserve.extras.responses.response_schemas import ResponseRequest

OTHER_IN_RESPONSES = OtherFields(
    refused={
        **without(obeyed_elsewhere(ResponseRequest), "stream_options"),
        **REFUSED,
        **REFUSED_IN_CHATS,
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "enable_response_messages": (False,),
        "moderation": (),
        "previous_input_messages": (),
        "previous_response": (),
        "prompt": (),
        "truncation": ("disabled",),
    },
    without_effect={
        **without({**WITHOUT_EFFECT, **WITHOUT_EFFECT_IN_CHATS}, *ResponseRequest.__struct_fields__),
        "max_tool_calls": (),
        "stream_options": ({}, {"include_obfuscation": False}),
    },
    instead={
        **INSTEAD,
        "enable_thinking": "chat_template_kwargs",
        "reasoning_effort": "reasoning.effort",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
    },
)
