"""Known fields, of Anthropic's API and of other routes, that the routes of Anthropic's API do not obey."""

from streamserve.api.http.ignored_fields import OtherFields, Values

_REFUSED: Values = {
    "compaction": (),
    "container": (),
    "fallbacks": ([],),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "n": (1,),
    "output_format": (),
    "response_format": (),
    "thread": (),
    "top_logprobs": (0,),
}
_KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
_WITHOUT_EFFECT: Values = {
    "billing_policy": (),
    "cache_control": (),
    "context_management": ({}, {"edits": []}, {"edits": [_KEEP_THINKING]}),
    "diagnostics": (),
    "fallback_credit_token": (),
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
_INSTEAD = {
    "max_completion_tokens": "max_tokens",
    "output_format": "output_config.format",
    "response_format": "output_config.format",
}

OTHER_IN_MESSAGES = OtherFields(refused=_REFUSED, without_effect=_WITHOUT_EFFECT, instead=_INSTEAD)
OTHER_IN_COUNTS = OtherFields(
    refused=_REFUSED,
    without_effect={**_WITHOUT_EFFECT, "max_tokens": (), "metadata": (), "stop_sequences": (), "stream": ()},
    instead=_INSTEAD,
)
