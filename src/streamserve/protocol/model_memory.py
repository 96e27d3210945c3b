"""The memory of several models: the server's request to `streamserve.workers.memory_plan`, and the answer,
both as msgpack."""

import msgspec

from streamserve.protocol.config import ModelConfig


class PlannedModel(msgspec.Struct, frozen=True):
    """A model and the number of its workers. `name` identifies the model in messages."""

    name: str
    config: ModelConfig
    workers: int


class MemoryRequest(msgspec.Struct, frozen=True):
    """The models of a server, and the maximum bytes of the models that are loaded at the same time. None: a
    share of the available memory."""

    models: tuple[PlannedModel, ...]
    budget: int | None


class ModelMemory(msgspec.Struct, frozen=True):
    """The memory of one model in bytes, over all of its workers: weights (a draft model's too), KV caches,
    host pools, and reserved memory for LoRA adapters. `num_blocks` is the size of each worker's KV cache."""

    weights: int
    kv_cache: int
    swap: int
    adapters: int
    num_blocks: int
    max_model_len: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.kv_cache + self.swap + self.adapters


class MemoryPlan(msgspec.Struct, frozen=True, tag=True):
    """The budget, and the memory of each model."""

    budget: int
    models: tuple[ModelMemory, ...]


class PlanRefused(msgspec.Struct, frozen=True, tag=True):
    """Why there is no plan: a model cannot be served, or does not fit in the memory."""

    error: str
