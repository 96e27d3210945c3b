"""Write a checkpoint with its layers' matrices quantized, as a compressed-tensors folder."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from streamserve.execution.formats.check import check_weights
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.formats.quantization import WeightFormat, quantize
from streamserve.execution.formats.shards import copy_other_files, write_shards
from streamserve.execution.formats.stored.compressed_integers import written_as, written_tensors
from streamserve.execution.formats.stored.compressed_tensors import written_config
from streamserve.execution.model.shapes import HEAD, matrix_shapes, router_modules, weight_shapes
from streamserve.execution.model.spec import ModelSpec, read_spec
from streamserve.protocol.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Receives the number of matrices quantized so far, and the number of all."""


def export(
    source: Path, target: Path, format: WeightFormat, progress: Progress = lambda done, total: None
) -> None:
    """Write the checkpoint of `source` to the folder `target`, with the matrices of its layers in `format`.
    The model's other tensors, its tokenizer, configs, templates and license are copied.

    The folder appears when it is complete: until then it has another name in the same parent folder, and it
    is removed if writing fails. The written model equals the model quantized to `format` at load. One layer
    is in memory at a time.

    Raises CheckpointError, before anything is written, if `source` cannot be read or is quantized already, if
    the format cannot represent its matrices, or if `target` is not empty.
    """
    target = target.resolve()
    spec = read_spec(source)
    checkpoint = Checkpoint(source)
    check_weights(checkpoint, spec)
    _check(source, target, spec, format)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error
    try:
        partial.chmod(0o755)
        copy_other_files(source, partial)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = written_config(written_as(format), router_modules(spec))
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_shards(partial, _shards(checkpoint, spec, format, progress), spec.num_layers + 1)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(source: Path, target: Path, spec: ModelSpec, format: WeightFormat) -> None:
    if spec.stored:
        raise CheckpointError(f"{source}: its weights are quantized already, in {spec.stored}")
    if spec.experts and spec.experts.tensors.stacked:
        raise CheckpointError(
            f"{source}: {spec.architecture} has the matrices of all experts in one tensor, for which no "
            "quantized checkpoint can be written: use --quantization when serving"
        )
    for module, (_, inputs) in matrix_shapes(spec).items():
        if format.group and inputs % format.group:
            raise CheckpointError(
                f"{source}: {module} has {inputs} inputs, not a multiple of the {format.group} of a group"
            )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty")


def _shards(
    checkpoint: Checkpoint, spec: ModelSpec, format: WeightFormat, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file: one file for embedding, norm and head, and one for each layer."""
    matrices = matrix_shapes(spec)
    tied_head = {HEAD} if spec.tied_embeddings and HEAD in checkpoint else set[str]()
    names = weight_shapes(spec).keys() | tied_head
    yield {name: _copied(checkpoint, name) for name in sorted(names) if not name.startswith("model.layers.")}
    done = 0
    for layer in range(spec.num_layers):
        tensors = dict[str, Tensor]()
        for name in (name for name in weight_shapes(spec) if name.startswith(f"model.layers.{layer}.")):
            module = name.removesuffix(".weight")
            if module not in matrices:
                tensors[name] = _copied(checkpoint, name)
                continue
            weight = quantize(checkpoint.tensor([name], torch.float32), format)
            # Other readers compute in the scales' dtype, so a bf16 model gets bf16 scales.
            scale_dtype = torch.bfloat16 if checkpoint.dtype(name) == torch.bfloat16 else torch.float32
            tensors |= written_tensors(written_as(format), module, weight, scale_dtype)
            done += 1
            progress(done, len(matrices))
        yield tensors


def _copied(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint.tensor([name], checkpoint.dtype(name))
