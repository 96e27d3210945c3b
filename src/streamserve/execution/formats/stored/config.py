"""Read the `quantization_config` of a checkpoint, of any supported method."""

from streamserve.execution.formats.stored import awq, compressed_tensors, fp8, gptq, mxfp4
from streamserve.execution.formats.stored.formats import Linears, StoredFormats, is_stacked
from streamserve.execution.model.fields import Fields, shown

METHODS = {
    "awq": awq.read_formats,
    "compressed-tensors": compressed_tensors.read_formats,
    "fp8": fp8.read_formats,
    "gptq": gptq.read_formats,
    "mxfp4": mxfp4.read_formats,
}
"""Readers of the formats, by `quant_method`. They take the config, whether the head is tied, and the names of
each layer's matrices."""


def read_stored_formats(config: Fields, tied_head: bool, linears: Linears) -> StoredFormats | None:
    """Return the stored formats of each layer's matrices `linears`, by a model's config; None without a
    quantization_config. Raises CheckpointError for a config that cannot be computed exactly."""
    value = config.get("quantization_config")
    if value is None:
        return None
    if not isinstance(value, dict):
        config.refuse("quantization_config", f"must be an object, not {shown(value)}")
    fields = Fields(f"{config.name}: quantization_config", value)
    method = fields.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        choices = ", ".join(map(repr, METHODS))
        fields.refuse("quant_method", f"{shown(method)} is not supported (supported: {choices})")
    if any(map(is_stacked, linears)) != (method == "mxfp4"):
        fields.refuse("quant_method", f"{method!r} is not supported with this architecture")
    return read(fields, tied_head, linears)
