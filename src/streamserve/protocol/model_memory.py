"""How much memory each of several models takes: what the server asks `streamserve.workers.memory_plan`, and
its answer, both as msgpack."""

import msgspec

from streamserve.protocol.config import ModelConfig


class PlannedModel(msgspec.Struct, frozen=True):
    """A model, as it is named in messages, and how many workers it has."""

    name: str
    config: ModelConfig
    workers: int


class MemoryRequest(msgspec.Struct, frozen=True):
    """The models of a server, and the bytes that those loaded at the same time may take; None: a share of
    what is available."""

    models: tuple[PlannedModel, ...]
    budget: int | None


class ModelMemory(msgspec.Struct, frozen=True):
    """The memory of one model in bytes, over all of its workers: weights (a draft model's too), KV caches,
    host pools, and what is reserved for LoRA adapters. `num_blocks` is the size of each worker's KV cache."""

    weights: int
    kv_cache: int
    swap: int
    adapters: int
    num_blocks: int
    max_model_len: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.swap + self.adapters


class MemoryPlan(msgspec.Struct, frozen=True, tag=True):
    """The budget, and the memory of each model."""

    budget: int
    models: tuple[ModelMemory, ...]


class PlanRefused(msgspec.Struct, frozen=True, tag=True):
    """Why there is no plan: a model cannot be served, or not in this memory."""

    error: str
