"""Check that a checkpoint has exactly the tensors of its model."""

from streamserve.execution.formats.checkpoint import Checkpoint, ExpectedTensor
from streamserve.execution.formats.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.formats.quantization import MAX_INPUTS
from streamserve.execution.formats.stored.formats import GgufBlocks
from streamserve.execution.model.shapes import EMBEDDING, HEAD, matrix_shapes, tensor_of, weight_shapes
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.errors import CheckpointError

AnyCheckpoint = Checkpoint | GgufCheckpoint

IGNORED = (".rotary_emb.inv_freq",)
"""Suffixes of tensors that some checkpoints contain and that are not loaded: the config determines them."""


def check_weights(checkpoint: AnyCheckpoint, spec: ModelSpec) -> None:
    """Raise CheckpointError, which names file and tensor, unless the checkpoint has exactly this model's
    tensors."""
    if isinstance(checkpoint, GgufCheckpoint):
        checkpoint.check(weight_shapes(spec))
        return
    tied_head = spec.tied_embeddings and HEAD in checkpoint
    checkpoint.check(_headers(checkpoint, spec), (*IGNORED, HEAD) if tied_head else IGNORED)
    if tied_head and not checkpoint.equal(HEAD, EMBEDDING):
        raise CheckpointError(
            f"{checkpoint.path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
        )


def _headers(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, ExpectedTensor]:
    """Return the required header of each tensor of a checkpoint. Raises CheckpointError for a matrix with
    more inputs than can share a scale."""
    plain = {name: ExpectedTensor(shape) for name, shape in weight_shapes(spec).items()}
    stored = dict[str, ExpectedTensor]()
    for module, shape in matrix_shapes(spec).items():
        format = spec.stored.of(module) if spec.stored else None
        if format is None:
            continue
        assert not isinstance(format, GgufBlocks)
        if not format.weights.floating and (format.weights.group or shape[1]) > MAX_INPUTS:
            raise CheckpointError(
                f"{checkpoint.path}: {module} has more than {MAX_INPUTS} inputs with one scale"
            )
        plain.pop(tensor_of(spec, module), None)  # of many modules that share a stack, the first one pops it
        stored |= format.headers(module, shape)
    return stored | plain
