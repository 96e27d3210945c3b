"""The configuration of a LoRA adapter, in PEFT's `adapter_config.json`. Fields that change the result and are
not supported are refused by name."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from streamserve.execution.model.fields import Fields, shown
from streamserve.execution.model.lora.targets import Targets, read_targets
from streamserve.protocol.errors import CheckpointError

N = TypeVar("N", int, float)

MAX_ALPHA = 1e6
MAX_PATTERNS = 1024
MAX_PATTERN_LENGTH = 256
MAX_QUANTIFIERS = 2
MAX_ALTERNATIVES = 4
"""Limits that keep a pattern's matching fast."""

REFUSED = {
    "use_dora": "DoRA is not served: train the adapter with use_dora=False, or merge it into the model",
    "lora_bias": "biases of adapters are not served: train with lora_bias=False, or merge the adapter",
    "modules_to_save": "modules trained in full are not served: merge the adapter into the model",
    "trainable_token_indices": "trained embeddings are not served: merge the adapter into the model",
    "target_parameters": "adapters of parameters outside of linear modules are not served: merge the adapter",
    "layer_replication": "replicated layers are not served: save the model with these layers",
    "megatron_config": "adapters of Megatron are not served: convert it to PEFT's usual layout",
    "fan_in_fan_out": "weights stored as (input, output) are not served: no served architecture has them",
    "alora_invocation_tokens": "activated LoRA is not served: merge the adapter into the model",
    "use_qalora": "QALoRA is not served: merge the adapter into the model",
    "arrow_config": "Arrow's routing between adapters is not served: choose an adapter by its name",
    "use_bdlora": "block-diagonal LoRA is not served: merge the adapter into the model",
    "velora_config": "VeLoRA is not served: merge the adapter into the model",
}
"""Fields that must be absent, null, false or empty, with the advice of the error message."""

HARMLESS = frozenset(
    {
        "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
        "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias",
        "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "lora_dropout", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "megatron_core", "qalora_group_size", "ensure_weight_tying",
    }
)  # fmt: skip
"""Fields that are read here, or that only training uses."""

PLAIN_INITIALIZATIONS = ("gaussian", "orthogonal", "eva")
"""Names of initializations that leave the base model's weights as they are."""


@dataclass(frozen=True)
class LoraConfig:
    """The rank and scale of an adapter. `ranks` and `alphas` have other values for modules whose names match
    a pattern. With `rslora` the scale is alpha / sqrt(rank), otherwise alpha / rank. `targets` are the
    modules that may have an adapter."""

    rank: int
    alpha: float
    rslora: bool
    targets: Targets
    ranks: tuple[tuple[re.Pattern[str], int], ...] = ()
    alphas: tuple[tuple[re.Pattern[str], float], ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of a module's two matrices."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (rank**0.5 if self.rslora else rank)


def read_config(name: str, content: bytes, max_rank: int) -> LoraConfig:
    """Return the configuration in the `content` of the file `name`. Raises CheckpointError, which names the
    field that is wrong or not supported."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{name}: must hold a JSON object")
    fields = Fields(name, values)
    _check_kind(fields)
    ranks = [
        (_pattern(fields, "rank_pattern", key), _rank(fields, "rank_pattern", value, max_rank))
        for key, value in _entries(fields, "rank_pattern").items()
    ]
    alphas = [
        (_pattern(fields, "alpha_pattern", key), _alpha(fields, "alpha_pattern", value))
        for key, value in _entries(fields, "alpha_pattern").items()
    ]
    return LoraConfig(
        rank=_rank(fields, "r", fields.get("r", 8), max_rank),
        alpha=_alpha(fields, "lora_alpha", fields.get("lora_alpha", 8)),
        rslora=fields.flag("use_rslora", False),
        targets=read_targets(fields),
        ranks=tuple(ranks),
        alphas=tuple(alphas),
    )


def _check_kind(fields: Fields) -> None:
    """Raise CheckpointError unless the configuration is of a supported kind of LoRA adapter."""
    if fields.get("peft_type") != "LORA":
        fields.refuse("peft_type", f"must be LORA, not {shown(fields.get('peft_type'))}")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        fields.refuse("task_type", f"must be CAUSAL_LM, not {shown(fields.get('task_type'))}")
    for field, reason in REFUSED.items():
        if fields.get(field):
            fields.refuse(field, f"is {shown(fields.get(field))}: {reason}")
    if fields.get("bias", "none") != "none":
        fields.refuse("bias", f"must be none, not {shown(fields.get('bias'))}: biases are not served")
    initialization = fields.get("init_lora_weights", True)
    if isinstance(initialization, str) and initialization not in PLAIN_INITIALIZATIONS:
        fields.refuse(
            "init_lora_weights",
            f"is {shown(initialization)}, which changes the base model's weights: save the adapter with "
            "path_initial_model_for_weight_conversion, which converts it to plain LoRA",
        )
    for field, value in fields.values.items():
        if field not in HARMLESS and field not in REFUSED and value not in (None, False, "", [], {}):
            fields.refuse(
                field,
                f"is {shown(value)}, which this version of streamserve does not support: merge the adapter",
            )


def _entries(fields: Fields, field: str) -> Mapping[str, Any]:
    nested = fields.nested(field)
    entries = nested.values if nested else {}
    if len(entries) > MAX_PATTERNS:
        fields.refuse(field, f"has {len(entries)} patterns, more than {MAX_PATTERNS}")
    return entries


def _pattern(fields: Fields, field: str, key: str) -> re.Pattern[str]:
    """Return the regular expression that PEFT matches module names with: `key` matches the end of a name,
    from a dot on. Raises CheckpointError for a pattern that could take long to match."""
    quantifiers = re.findall(r"[*+{]|(?<!\()\?", key.replace("\\.", "."))
    many = len(quantifiers) > MAX_QUANTIFIERS or key.count("|") > MAX_ALTERNATIVES
    if len(key) > MAX_PATTERN_LENGTH or many or re.search(r"\)[*+?{]", key):
        fields.refuse(field, f"has a pattern that is too complex: {shown(key)}: list the modules' names")
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError, RecursionError) as error:
        fields.refuse(field, f"has a pattern that is not a regular expression: {shown(key)}: {error}")


def _rank(fields: Fields, field: str, value: object, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fields.refuse(field, f"must be a positive integer, not {shown(value)}")
    if value > maximum:
        fields.refuse(
            field, f"is {shown(value)}, above the largest rank that this server takes: raise --max-lora-rank "
            f"(now {maximum})"
        )  # fmt: skip
    return value


def _alpha(fields: Fields, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_ALPHA:
        fields.refuse(field, f"must be a positive number up to {MAX_ALPHA:g}, not {shown(value)}")
    return float(value)


def _matching(entries: tuple[tuple[re.Pattern[str], N], ...], module: str, default: N) -> N:
    """Return the value of the first pattern that matches a module's name; `default` if no pattern matches."""
    return next((value for pattern, value in entries if pattern.match(module)), default)
