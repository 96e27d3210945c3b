"""The `quantization_config` of a compressed-tensors checkpoint: read, checked and written.

`config_groups` map lists of targets to a scheme: how weights and activations of these modules are quantized.
A target, or an entry of `ignore`, is a module's name, `re:` and a regular expression that matches from the
start of its name, or the class `Linear`. See `quant_config.py` of the package compressed-tensors.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter

from streamserve.execution.fields import Fields, shown
from streamserve.execution.quantization import GROUPS, WeightFormat

PACKED, PLAIN = "pack-quantized", "int-quantized"
METHOD = "compressed-tensors"
HEAD = "lm_head"
UNQUANTIZED = "unquantized"
MAX_PATTERNS, MAX_PATTERN, MAX_REPETITIONS = 64, 200, 4
"""Bounds of the patterns in a list of targets, and of the characters and repetitions in one."""
UNMATCHED = 3
"""The rank of a module that no target matches."""

LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""The linear modules of a layer."""

FUSED_LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""Those of an architecture whose checkpoints join q, k, v, and gate, up."""

JOINED = (LINEARS[:3], LINEARS[4:6])
"""Those of LINEARS whose weights are joined when they are loaded."""


@dataclass(frozen=True)
class StoredFormat:
    """How a matrix is stored: in `weights`, its numbers `packed` into 32-bit words or one a byte; None in the
    blocks of a GGUF file, which `weights` represent exactly."""

    weights: WeightFormat
    packed: bool | None


@dataclass(frozen=True)
class StoredFormats:
    """How the matrices of a checkpoint's layers are stored: `layers[layer]` has the formats of `linears`,
    None where a matrix is not quantized. At least one is."""

    layers: tuple[tuple[StoredFormat | None, ...], ...]
    linears: tuple[str, ...] = LINEARS

    def of(self, module: str) -> StoredFormat | None:
        """Return the format of a module, `model.layers.LAYER.LINEAR`."""
        _, _, layer, linear = module.split(".", 3)
        return self.layers[int(layer)][self.linears.index(linear)]

    @property
    def main(self) -> WeightFormat:
        """The format of the most matrices, of equally many the first."""
        formats = Counter(stored.weights for layer in self.layers for stored in layer if stored)
        return formats.most_common(1)[0][0]

    def __str__(self) -> str:
        names = {str(stored.weights) if stored else UNQUANTIZED for layer in self.layers for stored in layer}
        return ", ".join(sorted(names))


def read_stored_formats(
    config: Fields, layers: int, tied_head: bool, linears: tuple[str, ...] = LINEARS
) -> StoredFormats | None:
    """Return how the matrices `linears` of so many layers are stored according to a model's config; None
    without a quantization_config. Raises CheckpointError for what is not computed as the config says."""
    value = config.get("quantization_config")
    if value is None:
        return None
    if not isinstance(value, dict):
        config.refuse("quantization_config", f"must be an object, not {shown(value)}")
    fields = Fields(f"{config.name}: quantization_config", value)
    if fields.get("quant_method") != METHOD:
        fields.refuse(
            "quant_method", f"{shown(fields.get('quant_method'))} is not supported (supported: {METHOD!r})"
        )
    for name in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
        if fields.get(name):
            fields.refuse(name, "is not supported")
    sparsity = fields.nested("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        sparsity.refuse("format", f"{shown(sparsity.get('format'))} is not supported: only dense weights are")
    return _formats_of_layers(fields, layers, tied_head, linears)


def written_config(stored: StoredFormat) -> dict[str, object]:
    """Return the `quantization_config` of a checkpoint whose layers are stored in this format."""
    weights, name = stored.weights, PACKED if stored.packed else PLAIN
    scheme: dict[str, object] = {
        "num_bits": weights.bits,
        "type": "int",
        "symmetric": weights.symmetric,
        "strategy": "group" if weights.group else "channel",
        "group_size": weights.group,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": scheme,
        "input_activations": None,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": METHOD,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [HEAD],
        "kv_cache_scheme": None,
    }


def _formats_of_layers(
    fields: Fields, layers: int, tied_head: bool, linears: tuple[str, ...]
) -> StoredFormats:
    """Return what the config groups say of each matrix of the layers."""
    groups = fields.nested("config_groups")
    if groups is None:
        fields.refuse("config_groups", "is missing")
    schemes = []
    for name in groups.values:
        group = groups.nested(name)
        if group is None:
            groups.refuse(name, "must be an object")
        schemes.append((_matcher(group, "targets"), _scheme(group, fields.get("format"))))
    ignored = _matcher(fields, "ignore")

    def format_of(module: str) -> StoredFormat | None:
        ranks = [(rank(module), stored) for rank, stored in schemes]
        best, stored = min(ranks, key=itemgetter(0))
        return None if best == UNMATCHED or ignored(module) != UNMATCHED else stored

    if not tied_head and format_of(HEAD):
        fields.refuse("ignore", f"does not name {HEAD}: a quantized head is not supported")
    formats = []
    for layer in range(layers):
        own = {linear: format_of(f"model.layers.{layer}.{linear}") for linear in linears}
        for joined in JOINED:
            if len({own[linear] for linear in joined if linear in own}) > 1:
                fields.refuse("config_groups", f"give {', '.join(joined)} of layer {layer} different formats")
        formats.append(tuple(own.values()))
    if not any(any(own) for own in formats):
        fields.refuse("config_groups", "quantize no matrix of the layers")
    return StoredFormats(tuple(formats), linears)


def _matcher(fields: Fields, name: str) -> Callable[[str], int]:
    """Return a function of a linear module's name that returns its rank among the targets in field `name`: 0
    if its name is listed, 1 if a pattern matches, 2 by its class, else UNMATCHED. The lowest rank decides
    between groups, the first group between equal ranks."""
    targets = fields.get(name) or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        fields.refuse(name, f"must be a list of names, not {shown(targets)}")
    names = frozenset(target for target in targets if not target.startswith("re:"))
    patterns = _patterns(fields, name, (target for target in targets if target.startswith("re:")))

    def rank(module: str) -> int:
        if module in names:
            return 0
        if any(pattern.match(module) for pattern in patterns):
            return 1
        return 2 if "Linear" in names else UNMATCHED

    return rank


def _patterns(fields: Fields, name: str, targets: Iterable[str]) -> list[re.Pattern[str]]:
    patterns: list[re.Pattern[str]] = []
    for target in targets:
        pattern = target.removeprefix("re:")
        if len(pattern) > MAX_PATTERN or len(patterns) >= MAX_PATTERNS or _may_be_slow(pattern):
            fields.refuse(name, f"{shown(target)} is a pattern that may take too long, or one of too many")
        try:
            patterns.append(re.compile(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            fields.refuse(name, f"{shown(target)} is not a regular expression: {error}")
    return patterns


def _may_be_slow(pattern: str) -> bool:
    """Whether matching could backtrack for long: a repeated group, or many repetitions."""
    return len(re.findall(r"[*+{]", pattern)) > MAX_REPETITIONS or re.search(r"\)[*+{]", pattern) is not None


def _scheme(group: Fields, default_format: object) -> StoredFormat:
    """Return how the weights of a config group are stored. Raises CheckpointError for other schemes."""
    name = group.get("format") or default_format
    if name not in (PACKED, PLAIN):
        group.refuse("format", f"{shown(name)} is not supported (supported: {PACKED!r}, {PLAIN!r})")
    weights = group.nested("weights")
    if weights is None:
        group.refuse("weights", "is missing")
    for field, supported in (("type", "int"), ("dynamic", False)):
        if weights.get(field, supported) != supported:
            weights.refuse(field, f"{shown(weights.get(field))} is not supported (supported: {supported!r})")
    bits = weights.integer("num_bits")
    if bits not in (4, 8):
        weights.refuse("num_bits", f"{bits} is not supported (supported: 4, 8)")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        weights.refuse(
            "actorder", f"{shown(weights.get('actorder'))} is not supported: groups must follow the inputs"
        )
    _check_activations(group)
    format = WeightFormat(bits, _group(weights), weights.flag("symmetric", True))
    return StoredFormat(format, packed=name == PACKED)


def _group(weights: Fields) -> int | None:
    """Return the inputs of a group; None where all inputs of an output are one."""
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size == -1 else "group")
    if strategy == "channel":
        return None
    if strategy != "group":
        weights.refuse("strategy", f"{shown(strategy)} is not supported (supported: 'group', 'channel')")
    if isinstance(size, bool) or size not in GROUPS:
        choices = ", ".join(map(str, GROUPS))
        weights.refuse("group_size", f"{str(size)[:40]} is not supported (supported: {choices})")
    return int(size)


def _check_activations(group: Fields) -> None:
    """Raise CheckpointError unless activations are in 16 bits, or rounded to 8 when they are computed."""
    if group.get("output_activations"):
        group.refuse("output_activations", "is not supported")
    inputs = group.nested("input_activations")
    if inputs is None:
        return
    supported = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    for field, value in supported.items():
        if inputs.get(field, True if field == "symmetric" else None) != value:
            inputs.refuse(field, f"{shown(inputs.get(field))} is not supported (supported: {value!r})")
