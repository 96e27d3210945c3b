"""Open a model's checkpoint: a folder in Hugging Face layout, or GGUF files."""

from dataclasses import replace
from pathlib import Path

from streamserve.execution.formats.check import AnyCheckpoint, check_weights
from streamserve.execution.formats.checkpoint import BASE, Checkpoint
from streamserve.execution.formats.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.formats.gguf.spec import read_spec as read_gguf_spec
from streamserve.execution.model import spec as hugging_face
from streamserve.execution.model.shapes import HEAD
from streamserve.execution.model.spec import ModelSpec
from streamserve.execution.model.text_part import OTHER_PARTS
from streamserve.gguf.files import open_gguf
from streamserve.gguf.paths import gguf_file


def open_checkpoint(path: Path, embeds: bool = False) -> tuple[ModelSpec, AnyCheckpoint]:
    """Return the spec of the model at `path` and its checked tensors. A model that only `embeds` may be a
    base model without an output head. Raises CheckpointError, which names the file and the unsupported
    feature."""
    file = gguf_file(path)
    spec: ModelSpec
    checkpoint: AnyCheckpoint
    if file is None:
        spec = hugging_face.read_spec(path, embeds)
        further = range(spec.num_layers, spec.num_layers + spec.predictors)
        left_out = tuple(f"{BASE}layers.{layer}." for layer in further)
        checkpoint = Checkpoint(path, embeds, (*left_out, *(OTHER_PARTS if spec.multimodal else ())))
        spec = _with_stacks_of(checkpoint, spec)
        if embeds and HEAD not in checkpoint:
            spec = replace(spec, tied_embeddings=True)  # no logits are computed
        elif spec.multimodal:  # the fields of such configs disagree, in the config and in text_config
            spec = replace(spec, tied_embeddings=HEAD not in checkpoint)
    else:
        model = open_gguf(file)
        spec = read_gguf_spec(model)
        checkpoint = GgufCheckpoint(model, spec)
    check_weights(checkpoint, spec)
    return spec, checkpoint


def _with_stacks_of(checkpoint: Checkpoint, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the layout of the checkpoint's stacks of experts. transformers writes them as they
    are in its models, and reads published checkpoints, in which each matrix is transposed, too."""
    experts = spec.experts
    if experts is None or not experts.tensors.stacked or experts.tensors.alternating:
        return spec
    plain = replace(experts, tensors=replace(experts.tensors, transposed=False))
    layer, shapes = f"{BASE}layers.{experts.layers[0]}.", plain.stacks(spec.hidden_size)
    if any(checkpoint.shape(layer + name) != shape for name, shape in shapes.items()):
        return spec
    return replace(spec, experts=plain)
