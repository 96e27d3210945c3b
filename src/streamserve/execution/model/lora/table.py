"""The LoRA adapters that a worker has loaded, by the hash of their files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.execution.model.forward import LayerWeights, Model
from streamserve.execution.model.layout import Layout
from streamserve.execution.model.linear import LinearMap
from streamserve.execution.model.lora.step import step_adapters
from streamserve.execution.model.lora.types import LoadedAdapter, PackedAdapter, StepAdapters
from streamserve.execution.model.lora.weights import AdapterWeights, LinearKind, adapter_bytes, read_adapter
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError

Pack = Callable[[AdapterWeights, Sequence[LinearMap | None]], PackedAdapter]
"""Packs an adapter for the linear maps [layers × LinearKind] of a model."""


@dataclass(frozen=True)
class AdapterLimits:
    """Maximum number of loaded adapters, maximum rank, and maximum bytes of all their matrices."""

    count: int
    rank: int
    nbytes: int


class AdapterTable:
    """The loaded adapters of `model`, by the hash of their files. Adapters are loaded and unloaded between
    steps. `pack` packs an adapter for the kernels; without it, adapters are added in plain torch."""

    def __init__(self, model: Model, limits: AdapterLimits, pack: Pack | None = None) -> None:
        self.limits = limits
        self._pack = pack
        self._model = model
        self._maps = [linear for layer in model.layers for linear in _maps_of(layer)]
        self._loaded: dict[str, LoadedAdapter] = {}

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._loaded

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices of all loaded adapters."""
        return sum(adapter.nbytes for adapter in self._loaded.values())

    def load(self, fingerprint: str, path: str) -> None:
        """Load the adapter in the folder `path`; does nothing if it is loaded already. Raises CheckpointError
        for an adapter that is not supported or exceeds the limits."""
        if fingerprint in self._loaded:
            return
        limits = self.limits
        if len(self._loaded) >= limits.count:
            raise CheckpointError(
                f"{path}: {limits.count} adapters are loaded, which is the limit: unload one or raise "
                "--max-loras"
            )
        left = limits.nbytes - self.nbytes
        weights = read_adapter(path, fingerprint, self._model.spec, self._model.dtype, limits.rank, left)
        if self._pack:
            self._loaded[fingerprint] = LoadedAdapter(weights.nbytes, self._pack(weights, self._maps))
        else:
            self._loaded[fingerprint] = LoadedAdapter(weights.nbytes, weights=weights)

    def unload(self, fingerprint: str) -> None:
        """Forget an adapter and free its memory. Unknown ones are ignored."""
        self._loaded.pop(fingerprint, None)

    def of(self, layout: Layout) -> StepAdapters | None:
        """Return the adapters of a step's rows; None if no row has one. Raises ValueError for an adapter that
        is not loaded."""
        return step_adapters(layout, self._loaded)


def adapter_limits(config: ModelConfig, spec: ModelSpec, itemsize: int) -> AdapterLimits:
    """Return the limits by the settings. By default there is memory for all adapters at the maximum rank."""
    count, rank = config.max_loras, config.max_lora_rank
    whole = count * adapter_bytes(spec, rank, itemsize)
    return AdapterLimits(count, rank, whole if config.max_lora_bytes is None else config.max_lora_bytes)


def _maps_of(layer: LayerWeights) -> Sequence[LinearMap | None]:
    """Return the linear maps of a layer in the order of LinearKind."""
    maps = {
        LinearKind.QKV: layer.qkv,
        LinearKind.OUT: layer.out,
        LinearKind.GATE_UP: layer.gate_up,
        LinearKind.DOWN: layer.down,
    }
    return [maps[kind] for kind in LinearKind]
