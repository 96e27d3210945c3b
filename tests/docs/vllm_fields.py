"""The names of fields and events in vLLM's request and reply schemas, for comparison with the schemas of this
server.

From vllm/entrypoints/openai: chat_completion/protocol.py and completion/protocol.py at commit 002032ee2b18,
responses/protocol.py at commit 010a69cea9ac.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GENERATION = _names(
    """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
    logprob_token_ids bad_words add_special_tokens structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval
    """
)
REQUESTS = {
    "completions": _GENERATION | _names("prompt echo suffix prompt_embeds"),
    "chats": _GENERATION
    | _names(
        """
        messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
        parallel_tool_calls echo add_generation_prompt continue_final_message documents chat_template
        chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
        """
    ),
    "responses": _names(
        """
        background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text
        tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens
        include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority cache_salt
        enable_response_messages previous_input_messages previous_response structured_outputs
        repetition_penalty seed stop ignore_eos vllm_xargs
        """
    ),
}
"""Request fields by route."""

_REPLY = _names(
    """
    id object created model choices service_tier system_fingerprint usage metrics kv_transfer_params
    ec_transfer_params
    """
)
_CHOICE = _names("index logprobs finish_reason stop_reason token_ids routed_experts")
REPLIES = {
    "completion": _REPLY,
    "completion choice": _CHOICE | _names("text prompt_logprobs prompt_token_ids"),
    "chat": _REPLY | _names("prompt_logprobs prompt_token_ids prompt_text"),
    "chat choice": _CHOICE | _names("message"),
    "chat message": _names("role content refusal annotations audio function_call tool_calls reasoning"),
    "response": _names(
        """
        id created_at incomplete_details instructions metadata model object output parallel_tool_calls
        temperature tool_choice tools top_p background max_output_tokens max_tool_calls previous_response_id
        prompt reasoning service_tier status text top_logprobs truncation usage user input_messages
        output_messages
        """
    ),
    "response usage": _names(
        "input_tokens input_tokens_details output_tokens output_tokens_details total_tokens"
    ),
    "input details": _names("cached_tokens input_tokens_per_turn cached_tokens_per_turn"),
    "output details": _names(
        "reasoning_tokens tool_output_tokens output_tokens_per_turn tool_output_tokens_per_turn"
    ),
}
"""Fields of replies, by part of the reply."""

EVENTS = _names(
    """
    response.created response.in_progress response.completed response.output_item.added
    response.output_item.done response.content_part.added response.content_part.done
    response.output_text.delta response.output_text.done response.function_call_arguments.delta
    response.function_call_arguments.done response.reasoning_text.delta response.reasoning_text.done
    response.reasoning_part.added response.reasoning_part.done
    """
)
"""Events of a streamed response, without those of built-in tools and MCP."""
