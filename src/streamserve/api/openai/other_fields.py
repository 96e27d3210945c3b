"""Fields of other servers and of other routes that a route knows and does not obey.

Every field of a request is in one of four classes:

obeyed           a field of the route's struct
without effect   accepted with a warning: it does not change the result on this server
refused          status 400, naming the field: it would change the result
unknown          accepted with a warning
"""

from typing import Any

import msgspec

from streamserve.api.http.ignored_fields import OtherFields, Values
from streamserve.api.openai.schemas import ChatRequest, CompletionRequest

OBEYED_IN_RESPONSES: Values = {
    "include": ([],),
    "input": (),
    "instructions": (),
    "max_output_tokens": (),
    "parallel_tool_calls": (True,),
    "previous_response_id": (),
    "reasoning": (),
    "text": (),
}
"""Fields that only the Responses API obeys, and fields that have another default there."""

REFUSED: Values = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ec_transfer_params": (),
    "ebnf": (),
    "grammar": ("",),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    "max_new_tokens": (),
    "mirostat": (0,),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "num_predict": (),
    "regex": (),
    "repetition_detection": (),
    "repeat_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "tfs_z": (1,),
    "thinking_token_budget": (),
    "top_a": (0,),
    "truncation_side": ("left",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "xtc_probability": (0,),
}
"""Fields that would change the result, with the values that would not: refused with any other value."""

REFUSED_IN_CHATS: Values = {
    "audio": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "return_prompt_text": (False,),
}
WITHOUT_EFFECT: Values = {
    "cache_prompt": (),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "keep_alive": (),
    "length_penalty": (1,),
    "num_ctx": (),
    "prompt_cache_retention": ("in_memory",),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "store": (False,),
    "stream_interval": (1,),
}
WITHOUT_EFFECT_IN_CHATS: Values = {
    "mm_processor_kwargs": ({},),
    "prediction": (),
    "thinking": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
INSTEAD = {
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "guided_grammar",
    "json_schema": "response_format",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "regex": "guided_regex",
    "repeat_penalty": "repetition_penalty",
    "request_id": "the header X-Request-Id",
}
"""What to use instead of a field that is not obeyed, for the text of errors and warnings."""


def obeyed_elsewhere(kind: type[msgspec.Struct]) -> Values:
    """Return the fields that `kind` lacks and another route obeys, with their defaults. Fields that are
    accepted without effect are left out."""
    kinds: tuple[type[msgspec.Struct], ...] = (CompletionRequest, ChatRequest)
    fields = [field for other in kinds for field in msgspec.structs.fields(other)]
    known = {*kind.__struct_fields__, *WITHOUT_EFFECT, *WITHOUT_EFFECT_IN_CHATS}
    values = {**{field.name: default_of(field) for field in fields}, **OBEYED_IN_RESPONSES}
    return {name: accepted for name, accepted in values.items() if name not in known}


def default_of(field: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    """Return the accepted values of a field that a route does not obey: its default, if there is one."""
    if field.required:
        return ()
    made = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return () if made is None else (msgspec.to_builtins(made),)


def without(values: Values, *names: str) -> Values:
    """Return the values of all fields but those with these `names`."""
    return {known: accepted for known, accepted in values.items() if known not in names}


OTHER_IN_COMPLETIONS = OtherFields(
    refused={
        **obeyed_elsewhere(CompletionRequest),
        **REFUSED,
        "prompt_embeds": (),
        "suffix": ("",),
    },
    without_effect=WITHOUT_EFFECT,
    instead=INSTEAD,
)
OTHER_IN_CHATS = OtherFields(
    refused={
        **without(obeyed_elsewhere(ChatRequest), "reasoning"),
        **REFUSED,
        **REFUSED_IN_CHATS,
        "prompt_embeds": (),
    },
    without_effect={
        **without({**WITHOUT_EFFECT, **WITHOUT_EFFECT_IN_CHATS}, *ChatRequest.__struct_fields__),
        "reasoning": ({}, {"effort": None}),
    },
    instead={
        **INSTEAD,
        "max_output_tokens": "max_completion_tokens",
        "reasoning": "reasoning_effort",
        "thinking": "enable_thinking",
    },
)
OTHER_IN_STREAMS = OtherFields(
    refused={
        **OTHER_IN_COMPLETIONS.refused,
        **OTHER_IN_CHATS.refused,
        **OTHER_IN_COMPLETIONS.without_effect,
        **OTHER_IN_CHATS.without_effect,
        "add_generation_prompt": (True,),
        "best_of": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "prompt": (),
    },
    strict=True,
)
"""Only this server has prompt streams, so their fields are always strict."""
