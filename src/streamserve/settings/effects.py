"""Conditions under which settings have an effect. A setting that would be accepted but not obeyed is refused
by name.

The rules are data: a table of the documentation, and a test of every setting, are derived from them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from streamserve.baselines.orders import ORDERS
from streamserve.fleet.worker_state import Topology
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import parse_endpoints
from streamserve.protocol.draft_kind import DraftKind, draft_kind
from streamserve.protocol.keys import tenants
from streamserve.settings.commands import Use
from streamserve.settings.options import SettingsError
from streamserve.settings.server_config import ServerConfig

NOTHING = ("none", "off")
"""Values that switch a feature off. They are allowed whether or not the setting's condition holds."""


@dataclass(frozen=True)
class Configured:
    """All settings together, the workers that they ask for, and their use. `shared`: other models of the
    server share the settings of the whole server."""

    model: ModelConfig
    server: ServerConfig
    workers: Topology
    shared: bool = False
    use: Use = "serve"

    def given(self, name: str) -> Any:
        """Return the value of the setting `name`; None if it has its default."""
        value = getattr(self.model if name in ModelConfig.__struct_fields__ else self.server, name)
        return None if value == defaults()[name] else value


@dataclass(frozen=True)
class Need:
    """The condition under which `settings` have an effect.

    * `needed`: the condition in words, for the documentation. `met`: the condition as code.
    * `because`: the reason given when a setting is refused, as a format string of `model` and `server`.
    * `values`: values to which the condition applies; if empty, all except the default and `NOTHING`.
    """

    settings: tuple[str, ...]
    needed: str
    met: Callable[[Configured], bool]
    because: str
    values: tuple[Any, ...] = field(default=())

    def unmet(self, configured: Configured) -> list[str]:
        """Return the given settings whose condition does not hold."""
        given = {name: configured.given(name) for name in self.settings}
        wanted = [n for n, value in given.items() if value is not None and self._is_meant(value)]
        return [] if not wanted or self.met(configured) else wanted

    def _is_meant(self, value: Any) -> bool:
        return value in self.values if self.values else value not in NOTHING


@cache
def defaults() -> dict[str, Any]:
    """Return the default of every setting except the model's path."""
    fields = [field for struct in (ModelConfig, ServerConfig) for field in msgspec.structs.fields(struct)]
    return {field.name: field.default for field in fields if field.name != "path"}


def _has_tenants(configured: Configured) -> bool:
    return len(set(tenants(configured.server.api_key).values())) > 1


def _drafts(configured: Configured) -> bool:
    return draft_kind(configured.model.draft) is not DraftKind.NONE


def _samples_draft_tokens(configured: Configured) -> bool:
    return draft_kind(configured.model.draft) in (DraftKind.MODEL, DraftKind.FIRST_LAYERS)


def _has_services(configured: Configured) -> bool:
    return draft_kind(configured.model.draft) is DraftKind.SERVICE


def _has_service_with_key(configured: Configured) -> bool:
    draft = configured.model.draft
    return _has_services(configured) and any(endpoint.server_key for endpoint in parse_endpoints(draft))


def _has_pairs(configured: Configured) -> bool:
    return bool(configured.workers.prefill)


def _has_batches(configured: Configured) -> bool:
    return configured.server.batch_folder is not None


def _generates(configured: Configured) -> bool:
    return configured.model.task == "generate"


PAIRS = "`pairs`, or `prefill` and `decode`"
NO_TEXT = "task = {model.task!r} generates no text: leave this setting out, or change task"
NO_PAIRS = "give pairs, or prefill and decode"

NEEDS = (
    Need(
        ("draft", "speculation_policy", "speculation_mode", "pairs", "prefill", "decode", "chat_template",
         "trust_request_chat_template", "tool_parser", "reasoning_parser", "slo_admission",
         "max_grammar_bytes", "grammar_timeout", "lora", "max_loras", "max_lora_rank", "max_lora_bytes"),
        "a model that generates text",
        _generates,
        NO_TEXT,
    ),
    Need(
        ("max_streams", "stream_ttl", "max_stored_responses", "max_stored_response_bytes",
         "stored_response_ttl"),
        "a model that generates text",
        lambda configured: configured.shared or _generates(configured),
        NO_TEXT,
    ),
    Need(
        ("max_lora_rank", "max_lora_bytes"),
        "`lora`, or `max_loras` above 0",
        lambda configured: bool(configured.server.lora or configured.model.max_loras),
        "no LoRA adapters are served: give lora or max_loras",
    ),
    Need(
        ("prefill_share",),
        "`order = slo`",
        lambda configured: ORDERS[configured.model.order].by_targets,
        "order = {model.order!r} does not divide steps: use slo",
    ),
    Need(
        ("swap_space",),
        "`eviction = cost` or `swap`",
        lambda configured: configured.model.eviction != "recompute" or not configured.model.swap_space,
        "eviction = 'recompute' never swaps: use cost or swap",
    ),
    Need(
        ("eviction",),
        "`swap_space` above 0",
        lambda configured: bool(configured.model.swap_space),
        "without swap_space there is no memory to swap to: give swap_space",
        values=("swap",),
    ),
    Need(
        ("kv_cache_bytes",),
        "no `num_blocks`",
        lambda configured: configured.model.num_blocks is None,
        "num_blocks = {model.num_blocks} already sets the size of the KV cache: give only one of the two",
    ),
    Need(
        ("draft_key", "draft_model"),
        "a draft service",
        _has_services,
        "only draft services use it, but draft = {model.draft!r}",
    ),
    Need(
        ("draft_key",),
        "a draft service with a key",
        _has_service_with_key,
        "no draft service in draft has a key: give tcp://SERVERKEY@HOST:PORT, or leave draft_key out",
    ),
    Need(
        ("speculation_policy",),
        "a drafter",
        lambda configured: configured.model.speculation_policy == "off" or _drafts(configured),
        "there is no drafter (draft = 'none'): give draft",
    ),
    Need(
        ("speculation_mode",),
        "a drafter that samples: a draft model or `self:K`",
        _samples_draft_tokens,
        "draft = {model.draft!r} samples no draft tokens: use a draft model or self:K",
        values=("rejection",),
    ),
    Need(
        ("draft",),
        "a `speculation_policy` other than `off`",
        lambda configured: configured.model.speculation_policy != "off" or not _drafts(configured),
        "speculation_policy = 'off' never drafts: leave one of the two out",
    ),
    Need(
        ("listen", "join_key", "join_clients", "join_lease"),
        "`launcher = join` or `ray`",
        lambda configured: configured.server.launcher != "local",
        "only machines that join use it: give launcher = 'join'",
    ),
    Need(
        ("fork_workers",),
        "`launcher = local`",
        lambda configured: configured.server.launcher == "local",
        "other machines start their workers themselves: leave fork_workers out",
        values=(False,),
    ),
    Need(
        ("ray_address", "ray_resources"),
        "`launcher = ray`",
        lambda configured: configured.server.launcher == "ray",
        "only Ray uses it: give launcher = 'ray'",
    ),
    Need(
        ("kv_trusted_network",),
        "`kv_transport = nixl` and `launcher = join` or `ray`",
        lambda configured: configured.server.kv_transport == "nixl" and configured.server.launcher != "local",
        "only NIXL between machines uses it: give kv_transport = 'nixl' and launcher = 'join'",
    ),
    Need(
        ("router",),
        "2 or more `workers` or `pairs`, several `prefill` or `decode` workers, or `max_workers`",
        lambda configured: len(configured.workers.candidates()) > 1
        or (configured.server.max_workers or 0) > len(configured.workers.names),
        "all requests go to the same worker or pair: give 2 workers or pairs",
    ),
    Need(
        ("router",),
        "`enable_prefix_caching`",
        lambda configured: configured.model.enable_prefix_caching,
        "enable_prefix_caching = false leaves no prefixes to route by",
        values=("cache-aware",),
    ),
    Need(
        ("prefill_max_num_seqs", "prefill_max_num_batched_tokens", "prefill_max_chunk", "decode_max_num_seqs",
         "decode_max_num_batched_tokens", "decode_max_chunk"),
        PAIRS,
        _has_pairs,
        f"there are no such workers: {NO_PAIRS}",
    ),
    Need(
        ("kv_transport", "kv_bytes_per_second", "continue_tokens"),
        PAIRS,
        _has_pairs,
        f"without pairs no KV is transferred: {NO_PAIRS}",
    ),
    Need(
        ("continue_tokens",),
        "`enable_prefix_caching`",
        lambda configured: configured.model.enable_prefix_caching,
        "enable_prefix_caching = false leaves no turn to continue",
    ),
    Need(
        ("max_requests_per_key",),
        "`api_key` or `api_key_file`",
        lambda configured: bool(configured.server.api_key),
        "there are no keys: give api_key or api_key_file",
    ),
    Need(
        ("share_prefixes",),
        "keys of several tenants",
        _has_tenants,
        "there are no tenants to share prefixes: give several keys",
    ),
    Need(
        ("share_prefixes",),
        "`enable_prefix_caching`",
        lambda configured: configured.shared or configured.model.enable_prefix_caching,
        "enable_prefix_caching = false leaves no prefixes to share",
    ),
    Need(
        ("max_stored_response_bytes", "stored_response_ttl"),
        "`max_stored_responses` above 0",
        lambda configured: configured.server.max_stored_responses > 0,
        "max_stored_responses = 0 stores no responses",
    ),
    Need(
        ("max_batch_file_bytes", "max_batch_folder_bytes", "max_batch_requests"),
        "`batch_folder`",
        _has_batches,
        "without batch_folder there are no batches: give batch_folder",
    ),
    Need(
        ("batch_concurrency",),
        "`batch_folder`, or `streamserve batch`",
        lambda configured: configured.use == "batch" or _has_batches(configured),
        "without batch_folder there are no batches: give batch_folder",
    ),
    Need(
        ("ssl_keyfile",),
        "`ssl_certfile`",
        lambda configured: configured.server.ssl_certfile is not None,
        "it has no effect without ssl_certfile",
    ),
)  # fmt: skip
"""All conditions, in the order in which they are checked: a refusal gives the first that does not hold."""


def check_effect(configured: Configured) -> None:
    """Raise SettingsError for a setting that would have no effect together with the other settings. The
    message says why, and what to change."""
    for need in NEEDS:
        for name in need.unmet(configured):
            because = need.because.format(model=configured.model, server=configured.server)
            raise SettingsError(f"{name} = {configured.given(name)!r}: {because}")
