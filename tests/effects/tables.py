"""Every setting of a server by the place where its effect is observed, and the contexts in which it is
changed."""

from typing import Any

from streamserve import embedded

SERVICE = "tcp://127.0.0.1:7799"

CONTEXTS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "no drafter": {"draft": "none"},
    "n-grams": {"draft": "ngram"},
    "a draft service": {"draft": SERVICE},
    "no speculation": {"speculation_policy": "off"},
    "workers": {"workers": 3},
    "a pair": {"pairs": 1},
    "pairs": {"pairs": 2},
    "uneven pools": {"prefill": 1, "decode": 2},
    "another order": {"order": "chunked"},
    "recomputing": {"eviction": "recompute"},
    "swapping": {"eviction": "swap", "swap_space": 0.05},
    "no prefix cache": {"enable_prefix_caching": False},
    "little memory": {"num_blocks": 20},
    "pairs without a prefix cache": {"pairs": 2, "enable_prefix_caching": False, "num_blocks": 20},
}

SIMULATED: dict[str, Any] = {
    "max_model_len": 120,
    "kv_cache_bytes": 18 << 20,
    "num_blocks": 19,
    "block_size": 8,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "max_chunk": 7,
    "order": "prefill-first",
    "prefill_share": 0.05,
    "slo_admission": True,
    "enable_prefix_caching": False,
    "eviction": "swap",
    "swap_space": 0.05,
    "preempt_every": 3,
    "draft": "self:1",
    "speculation_policy": "fixed:2",
    "max_requests": 4,
    "max_waiting_tokens": 150,
    "workers": 2,
    "pairs": 3,
    "prefill": 1,
    "decode": 1,
    "prefill_max_num_seqs": 2,
    "prefill_max_num_batched_tokens": 24,
    "prefill_max_chunk": 7,
    "decode_max_num_seqs": 2,
    "decode_max_num_batched_tokens": 9,
    "decode_max_chunk": 5,
    "router": "random",
    "kv_bytes_per_second": 2e6,
}
"""Settings that change what clients receive in virtual time, each with a value to try."""

LOADED: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "int8",
    "backend": "reference",
    "kernel_path": "portable",
    "numerics": "portable",
    "quantization": "int8",
    "head_quantization": "int8",
    "threads": 1,
    "speculation_mode": "rejection",
    "check": True,
}
"""Settings that change which objects are loaded."""

SERVED: dict[str, Any] = {
    "max_requests_per_key": 3,
    "max_body_bytes": 2048,
    "max_memory_bytes": 2 << 20,
    "strict_fields": True,
    "max_connections": 7,
    "max_connections_per_address": 5,
    "max_streams": 4,
    "stream_ttl": 9.0,
    "max_stored_responses": 3,
    "max_stored_response_bytes": 4096,
    "stored_response_ttl": 5.0,
    "batch_folder": "/tmp/batches",
    "max_batch_file_bytes": 4096,
    "max_batch_folder_bytes": 8192,
    "max_batch_requests": 5,
    "batch_concurrency": 2,
    "trust_request_chat_template": True,
    "tool_parser": "hermes",
    "reasoning_parser": "qwen3",
    "special_tokens_in_messages": True,
    "request_timeout": 9.0,
    "read_timeout": 9.0,
    "write_timeout": 9.0,
    "drain_timeout": 9.0,
    "api_key": ("a-key",),
    "admin_key": ("a-key",),
    "metrics_key": ("a-key",),
    "share_prefixes": True,
    "cors_origin": ("https://app.example",),
}
"""Settings of the API server, each with a value to try; `test_every_setting_of_the_api_is_used` checks that
they are read."""

KEY_FILES = ("api_key_file", "admin_key_file", "metrics_key_file")
"""Settings that name files of keys, which the API server receives."""

TESTED: dict[str, str] = {
    "stuck_after": "simulate/test_heartbeat.py::test_without_heartbeats_it_is_killed",
    "continue_tokens": "simulate/test_chat.py::test_long_continuations_go_to_a_prefill_worker",
    "tensor_parallel_size": (
        "execution/backends/cuda/test_parallel.py::test_ranks_give_the_texts_of_one_process"
    ),
    "task": "extras/pooling/test_embeddings.py::test_embeddings_are_those_of_transformers",
    "host": "test_serve.py::test_listening_on_other_interfaces_without_a_key_is_warned_about",
    "port": "test_serve.py::test_a_taken_port_is_one_clear_line",
    "ssl_certfile": "test_serve.py::test_a_server_with_a_certificate_speaks_https",
    "ssl_keyfile": "system/test_tls.py::test_a_pair_is_accepted",
    "chat_template": "llm/test_templates.py::test_a_given_template_replaces_the_model_s",
    "served_model_name": "test_several_settings.py::test_one_model_is_served_as_before",
    "models_memory_bytes": "test_several_models.py::test_the_refusal_is_one_line_and_exit_status_2",
    "idle_unload": "test_model_pool.py::test_an_idle_model_is_unloaded_and_loaded_again",
    "load_timeout": "test_model_pool.py::test_waiting_requests_are_bounded_and_refused_at_the_end",
    "memory_timeout": "test_model_pool.py::test_a_model_in_use_is_never_unloaded_and_the_refusal_names_it",
    "max_grammar_bytes": "protocol/test_grammar.py::test_a_limit_can_be_lower",
    "grammar_timeout": "text/test_grammar.py::test_a_slow_grammar_is_refused_and_waiting_ones_get_503",
    "device": "test_embedding_settings.py::test_a_gpu_is_refused",
    "profile": "test_profiling.py::test_no_profile_stores_nothing",
    "lora": "test_lora.py::test_requests_choose_an_adapter_by_model",
    "max_loras": "test_lora.py::test_adapters_are_loaded_and_unloaded_while_serving",
    "max_lora_rank": "execution/model/lora/test_lora.py::test_limits_on_number_rank_and_bytes",
    "max_lora_bytes": "execution/model/lora/test_lora.py::test_limits_on_number_rank_and_bytes",
    "max_workers": "test_scaling.py::test_workers_are_added_and_removed_while_serving",
    "launcher": "extras/cluster/test_join.py::"
    "test_workers_start_on_machines_that_join_and_stop_with_the_head",
    "fork_workers": "test_forked_workers.py::test_a_forked_worker_is_like_a_started_one",
    "listen": "extras/cluster/test_join.py::test_an_address_in_use_is_an_error_that_names_it",
    "join_key": "extras/cluster/test_join.py::test_without_a_key_nothing_is_said_beyond_the_handshake",
    "join_clients": "extras/cluster/test_join.py::test_keys_that_are_not_allowed_are_refused_and_logged",
    "ray_address": "extras/cluster/test_ray.py::test_ray_places_workers",
    "ray_resources": "extras/cluster/test_ray.py::test_ray_places_workers",
    "join_lease": "extras/cluster/test_join.py::test_a_machine_comes_back_after_its_lease_and_serves_again",
    "draft_key": "test_draft_service.py::test_text_is_the_same_when_the_service_fails",
    "draft_model": "draft_service/test_client.py::test_other_draft_models_than_those_allowed_are_not_used",
    "kv_transport": "test_pairs.py::test_pairs_give_the_text_of_one_worker",
    "kv_trusted_network": "extras/cluster/test_nixl.py::test_nixl_between_machines_needs_a_trusted_network",
    "timeline": "test_timeline.py::test_a_timeline_shows_all_processes_of_a_pair",
    "otlp_traces_endpoint": "test_timeline.py::test_traces_that_cannot_be_sent_are_refused",
    "log_level": "system/test_logs.py::test_levels_and_the_access_log",
    "log_format": "system/test_logs.py::test_a_line_of_json",
    "access_log": "system/test_logs.py::test_levels_and_the_access_log",
}  # fmt: skip
"""Settings whose effect another test shows, since it needs files, sockets, processes or several models."""

OF_TEXT: dict[str, Any] = {
    "continue_tokens": 0,
    "max_grammar_bytes": 4096,
    "grammar_timeout": 2.0,
    "draft_key": "/some/key",
    "draft_model": ("0" * 64,),
    "ssl_keyfile": "/some/key",
    "kv_transport": "nixl",
    "kv_trusted_network": True,
    "lora": ("style=/some/folder",),
    "chat_template": str(embedded.path("embedded") / "chat_template.jinja"),
    "max_loras": 2,
    "max_lora_rank": 8,
    "max_lora_bytes": 4096,
    "max_workers": 4,
    "listen": "tcp://127.0.0.1:7801",
    "join_key": "/some/key",
    "join_clients": "/some/keys",
    "join_lease": 3.0,
    "ray_address": "10.0.0.1:6379",
    "ray_resources": ("fast=1",),
}
"""Values for settings that other settings need, among the settings tested elsewhere."""
