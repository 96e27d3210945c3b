"""Read and write the `quantization_config` of compressed-tensors checkpoints.

`config_groups` map lists of targets to a scheme, which has the formats of the modules' weights and
activations. A target, or an entry of `ignore`, is a module's name, `re:` and a regular expression that
matches from the start of the name, or the class `Linear`. Source: `quant_config.py` of the package
compressed-tensors.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Literal

from streamserve.execution.formats.quantization import WeightFormat
from streamserve.execution.formats.stored.compressed_integers import CompressedIntegers
from streamserve.execution.formats.stored.formats import (
    HEAD,
    Linears,
    StoredFormat,
    StoredFormats,
    formats_of_layers,
    group_size,
    require,
)
from streamserve.execution.formats.stored.fp8 import Floats, block_of, floating
from streamserve.execution.model.fields import Fields, shown
from streamserve.execution.model.patterns import matching_steps

FORMATS = PACKED, PLAIN, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
METHOD = "compressed-tensors"
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
"""The only supported scheme of quantized activations."""
BY_ACTIVATION = ("group", True)
"""Values of `actorder` with which inputs are grouped by activity, so that
groups need not follow the inputs."""
MAX_PATTERNS, MAX_PATTERN = 64, 200
"""Maximum number of patterns in a list of targets, and maximum characters of a pattern."""
MAX_STEPS, MAX_ALL_STEPS = 10_000_000, 5_000_000_000
"""Maximum steps of matching a pattern with one name, and of matching all patterns of a list with the names of
all modules, which take some ten seconds."""
UNMATCHED = 3
"""The rank of a module that no target matches."""


def read_formats(fields: Fields, tied_head: bool, linears: Linears) -> StoredFormats:
    """Return the formats of each layer's matrices `linears` by the config groups. Raises CheckpointError for
    schemes that are not supported."""
    for name in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
        if fields.get(name):
            fields.refuse(name, "is not supported")
    sparsity = fields.nested("sparsity_config")
    if sparsity:
        require(sparsity, "format", "dense")
    groups = fields.nested("config_groups")
    if groups is None:
        fields.refuse("config_groups", "is missing")
    schemes, modules = [], 1 + sum(map(len, linears))
    for name in groups.values:
        group = groups.nested(name)
        if group is None:
            groups.refuse(name, "must be an object")
        schemes.append((_matcher(group, "targets", modules), _scheme(group, fields.get("format"))))
    ignored = _matcher(fields, "ignore", modules)

    def format_of(module: str) -> StoredFormat | None:
        ranks = [(rank(module), stored) for rank, stored in schemes]
        best, stored = min(ranks, key=itemgetter(0))
        return None if best == UNMATCHED or ignored(module) != UNMATCHED else stored

    if not tied_head and format_of(HEAD):
        fields.refuse("ignore", f"does not name {HEAD}: a quantized head is not supported")
    return formats_of_layers(fields, "config_groups", format_of, linears)


def written_config(stored: CompressedIntegers, others: Sequence[str] = ()) -> dict[str, object]:
    """Return the `quantization_config` of a checkpoint whose matrices, except the head and `others`, are
    stored in this format. With bytes and one scale an output it states that activations are quantized too,
    because only then vLLM multiplies integers."""
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
        "input_activations": None if weights.group else ACTIVATIONS,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": METHOD,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [HEAD, *others],
        "kv_cache_scheme": None,
    }


def _matcher(fields: Fields, name: str, modules: int) -> Callable[[str], int]:
    """Return a function from a linear module's name to its rank among the targets in field `name`: 0 if its
    name is listed, 1 if a pattern matches, 2 if its class is listed, otherwise UNMATCHED. A module belongs to
    the group with its lowest rank, among equal ranks to the first group. The function is called for about
    `modules` names, which bounds the patterns."""
    targets = fields.get(name) or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        fields.refuse(name, f"must be a list of names, not {shown(targets)}")
    names = frozenset(target for target in targets if not target.startswith("re:"))
    patterns = _patterns(fields, name, (target for target in targets if target.startswith("re:")), modules)

    def rank(module: str) -> int:
        if module in names:
            return 0
        if any(pattern.match(module) for pattern in patterns):
            return 1
        return 2 if "Linear" in names else UNMATCHED

    return rank


def _patterns(fields: Fields, name: str, targets: Iterable[str], modules: int) -> list[re.Pattern[str]]:
    patterns: list[re.Pattern[str]] = []
    steps = 0.0
    for target in targets:
        pattern = target.removeprefix("re:")
        own = matching_steps(pattern)
        steps += own * modules
        too_slow = own > MAX_STEPS or steps > MAX_ALL_STEPS
        if len(pattern) > MAX_PATTERN or len(patterns) >= MAX_PATTERNS or too_slow:
            fields.refuse(
                name, f"{shown(target)} is a pattern that is too complex, or one of too many patterns"
            )
        try:
            patterns.append(re.compile(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            fields.refuse(name, f"{shown(target)} is not a regular expression: {error}")
    return patterns


def _scheme(group: Fields, default_format: object) -> StoredFormat:
    """Return the format of the weights of a config group. Raises CheckpointError if its scheme is not
    supported."""
    name = group.get("format") or default_format
    if name not in FORMATS:
        choices = ", ".join(map(repr, FORMATS))
        group.refuse("format", f"{shown(name)} is not supported (supported: {choices})")
    weights = group.nested("weights")
    if weights is None:
        group.refuse("weights", "is missing")
    require(weights, "dynamic", False)
    if group.get("output_activations"):
        group.refuse("output_activations", "is not supported")
    bits = weights.integer("num_bits")
    if name == FLOATS:
        return _floats(group, weights, bits)
    require(weights, "type", "int")
    if bits not in (4, 8):
        weights.refuse("num_bits", f"{bits} is not supported (supported: 4, 8)")
    require(weights, "actorder", False, "weight", "static", *BY_ACTIVATION)
    _check_activations(group)
    format = WeightFormat(bits, _group(weights), weights.flag("symmetric", True))
    return CompressedIntegers(format, name == PACKED, ordered=weights.get("actorder") in BY_ACTIVATION)


def _floats(group: Fields, weights: Fields, bits: int) -> Floats:
    """Return the format of weights of 8-bit floats. Activations stay in the model's dtype even if the config
    quantizes them to 8 bits: that is more exact."""
    require(weights, "type", "float")
    require(weights, "symmetric", True)
    if bits != 8:
        weights.refuse("num_bits", f"{bits} is not supported (supported: 8)")
    inputs = group.nested("input_activations")
    if inputs:
        require(inputs, "type", "float")
        require(inputs, "symmetric", True)
        require(inputs, "num_bits", 8)
        require(inputs, "dynamic", False, True)
    static = None if inputs is None or inputs.get("dynamic") else "input_scale"
    require(weights, "strategy", "tensor", "channel", "block")
    if weights.get("strategy") == "block":
        rows, columns = block_of(weights, "block_structure")
        return Floats(floating(columns), "weight_scale", "block", rows, static)
    scales: Literal["tensor", "channel"] = "channel" if weights.get("strategy") == "channel" else "tensor"
    return Floats(floating(None), "weight_scale", scales, activation_scale=static)


def _group(weights: Fields) -> int | None:
    """Return the number of inputs in a group; None if all inputs of an output are one group."""
    strategy = weights.get("strategy") or ("channel" if weights.get("group_size") == -1 else "group")
    if strategy == "channel":
        return None
    if strategy != "group":
        weights.refuse("strategy", f"{shown(strategy)} is not supported (supported: 'group', 'channel')")
    return group_size(weights)


def _check_activations(group: Fields) -> None:
    """Raise CheckpointError unless activations are in 16 bits, or dynamically rounded to 8 bits."""
    inputs = group.nested("input_activations")
    if inputs is None:
        return
    for field, value in ACTIVATIONS.items():
        if inputs.get(field, True if field == "symmetric" else None) != value:
            inputs.refuse(field, f"{shown(inputs.get(field))} is not supported (supported: {value!r})")
