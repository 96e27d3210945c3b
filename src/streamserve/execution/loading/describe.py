"""Describe a checkpoint without loading it: its architecture, sizes, and the memory that serving it takes."""

from dataclasses import dataclass
from pathlib import Path

from streamserve.execution.compute.kv_cache import bytes_per_block
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.loading.loaded import open_source
from streamserve.execution.model.fields import read_fields
from streamserve.execution.model.shapes import count_parameters, weight_bytes
from streamserve.gguf.files import open_gguf
from streamserve.gguf.paths import gguf_file
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError


@dataclass(frozen=True)
class Description:
    """A checkpoint with the default settings. `weights` describes the formats of the weights, `context` is in
    tokens, `weight_bytes` is the weights' memory, and `kv_token_bytes` each token's memory in the KV
    cache."""

    architecture: str
    parameters: int
    weights: str
    context: int
    vocabulary: int
    layers: int
    weight_bytes: int
    kv_token_bytes: int


def describe(path: Path, embeds: bool = False) -> Description:
    """Return the description of the model at `path`. With `embeds` it may be a base model (open_checkpoint).
    Raises CheckpointError if it cannot be served."""
    spec, checkpoint = open_checkpoint(path, embeds)
    source = open_source(ModelConfig(path=str(path), draft="none"), checkpoint, spec)
    quantized = f", layers in {source.quantization}" if source.quantization != "none" else ""
    quantized += f", head in {source.head}" if source.head else ""
    return Description(
        architecture=spec.architecture,
        parameters=count_parameters(spec),
        weights=source.dtype_name + quantized,
        context=spec.max_position_embeddings,
        vocabulary=spec.vocab_size,
        layers=spec.num_layers,
        weight_bytes=weight_bytes(spec, source.dtype, False, source.format, source.head),
        kv_token_bytes=bytes_per_block(spec, 1, source.dtype),
    )


def architecture(path: Path) -> str:
    """Return the architecture that the files at `path` name, supported or not; "-" if they name none."""
    try:
        file = gguf_file(path)
        if file is not None:
            return open_gguf(file).metadata.text("general.architecture")
        named = read_fields(path / "config.json").values.get("architectures")
    except CheckpointError:
        return "-"
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "-"
