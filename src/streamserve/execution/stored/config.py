"""The `quantization_config` of a checkpoint, whichever method wrote it."""

from streamserve.execution.fields import Fields, shown
from streamserve.execution.stored import awq, compressed_tensors, fp8, gptq
from streamserve.execution.stored.formats import LINEARS, StoredFormats

METHODS = {
    "awq": awq.read_formats,
    "compressed-tensors": compressed_tensors.read_formats,
    "fp8": fp8.read_formats,
    "gptq": gptq.read_formats,
}
"""By `quant_method`: what reads the formats of so many layers, with the head tied to the embedding or not, of
these linear modules."""


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
    method = fields.get("quant_method")
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        choices = ", ".join(map(repr, METHODS))
        fields.refuse("quant_method", f"{shown(method)} is not supported (supported: {choices})")
    return read(fields, layers, tied_head, linears)
