"""The models of a server by name: which model a request names, and whether it is loaded."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.registry import Collector

from streamserve.api.generator import Generator, Health
from streamserve.api.http.drain import RequestGate
from streamserve.api.metrics.metrics import Metrics
from streamserve.api.metrics.pool_metrics import ModelState, exposition_of_all
from streamserve.api.settings import ApiSettings
from streamserve.protocol.errors import RequestError


@dataclass(frozen=True)
class ModelEntry:
    """One model of a table: its engine, its settings of the API, and its metrics.

    `planned_len` is the length of the model's context if that is known before the model is loaded.
    """

    llm: Generator
    settings: ApiSettings
    metrics: Metrics
    planned_len: int | None = None

    @property
    def max_model_len(self) -> int:
        """The length of the model's context. Raises RequestError (503) while that is unknown."""
        return self.llm.model.max_model_len if self.planned_len is None else self.planned_len

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model and of its LoRA adapters."""
        return (*self.llm.served_names, *self.llm.adapters)


class Pool(Protocol):
    """Loads and unloads models by name."""

    @property
    def models(self) -> Mapping[str, ModelState]:
        """The states of the models that are loaded on demand; models without a state are always loaded."""

    async def acquire(self, name: str, patient: bool = False) -> None:
        """Wait until a model is loaded, and keep it loaded until `release`.

        Raises RequestError if it cannot be loaded, or not in time. `patient`: wait without a time limit.
        """

    def release(self, name: str) -> None:
        """End one `acquire` of a model."""

    def unload(self, name: str) -> None:
        """Begin to unload a model; a no-op if it is not loaded. Raises RequestError (409) if it is always
        loaded, being loaded, or in use."""


class AlwaysLoaded:
    """The pool of models that are loaded as long as the server runs."""

    def __init__(self) -> None:
        self.models: Mapping[str, ModelState] = {}

    async def acquire(self, name: str, patient: bool = False) -> None:
        """Return at once."""

    def release(self, name: str) -> None:
        """Do nothing."""

    def unload(self, name: str) -> None:
        """Raises RequestError (409)."""
        text = f"the model {name!r} is always loaded: --idle-unload, or several models, load models on demand"
        raise RequestError(text, status=409)


@dataclass(frozen=True)
class ServingHealth:
    """The health of a server that serves requests."""

    ready: bool = True
    detail: str = "ready"
    retry_after: float | None = None
    missing: str = ""


@dataclass(frozen=True)
class ModelTable:
    """The models of a server, one or several, by their names in the pool. The first model is the default.

    `collectors` yield the pool's metrics.
    """

    entries: Mapping[str, ModelEntry]
    pool: Pool = field(default_factory=AlwaysLoaded)
    collectors: tuple[Collector, ...] = ()
    _reserved: set[str] = field(default_factory=set)

    def find(self, requested: str | None) -> str:
        """Return the pool's name of the requested model, or of the model that has the requested LoRA adapter.

        Raises RequestError (404) for unknown names.
        """
        for name, entry in self.entries.items():
            if requested is None or requested in entry.names:
                return name
        raise _unknown(requested, self._names())

    def has(self, requested: str | None) -> bool:
        """Return whether there is a model or LoRA adapter of this name."""
        return requested is None or requested in self._names()

    @contextmanager
    def reserved(self, adapter: str) -> Iterator[None]:
        """Reserve a name for an adapter that is loaded within the block. Raises RequestError if the name is
        in use."""
        if adapter in self._reserved or adapter in self._names():
            raise RequestError(f"lora_name: the name {adapter!r} is in use", field="lora_name")
        self._reserved.add(adapter)
        try:
            yield
        finally:
            self._reserved.remove(adapter)

    def _names(self) -> list[str]:
        return [name for entry in self.entries.values() for name in entry.names]

    def context_lengths(self) -> list[tuple[int, Generator]]:
        """Return the context length of each model for which it is known."""
        known = []
        for entry in self.entries.values():
            with suppress(RequestError):
                known.append((entry.max_model_len, entry.llm))
        return known

    def health(self) -> Health:
        """Return whether requests are served. The server is not healthy before the default model was loaded
        once, or while a loaded model has no healthy workers."""
        first = next(iter(self.entries))
        if first not in self.pool.models or not self.pool.models[first].loads:
            return self.entries[first].llm.health()
        healths = [entry.llm.health() for name, entry in self.entries.items() if self.loaded(name)]
        missing = "; ".join(health.missing for health in healths if health.missing)
        return next((health for health in healths if not health.ready), ServingHealth(missing=missing))

    def states(self) -> dict[str, str]:
        """Return the state of each model that is loaded on demand."""
        return {name: model.state for name, model in self.pool.models.items()}

    def loaded(self, name: str) -> bool:
        state = self.pool.models.get(name)
        return state is None or state.state == "loaded"

    def exposition(self) -> bytes:
        """Return the metrics of all models in Prometheus' text format."""
        metrics = [entry.metrics.collector for entry in self.entries.values()]
        return exposition_of_all([*metrics, *self.collectors])

    async def acquire(self, name: str, drain: RequestGate, patient: bool = False) -> None:
        """Wait until a model is loaded, and keep it loaded until the pool's `release`.

        Raises RequestError (503) if the model cannot be loaded, or not in time (unless `patient`), or if the
        server drains.
        """
        if self.loaded(name):
            await self.pool.acquire(name)
        else:
            await self._load(name, drain, patient)

    async def _load(self, name: str, drain: RequestGate, patient: bool) -> None:
        """Acquire a model. Raises RequestError (503) as soon as the server drains."""
        loading = asyncio.ensure_future(self.pool.acquire(name, patient))
        drained = asyncio.ensure_future(drain.begun())
        acquired = False
        try:
            await asyncio.wait({loading, drained}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                acquired = True
                return
        finally:
            loading.cancel()
            drained.cancel()
            await asyncio.gather(loading, drained, return_exceptions=True)
            if not (acquired or loading.cancelled() or loading.exception()):
                self.pool.release(name)  # the model was loaded just when this ended
        raise RequestError(
            "the server is draining: it takes no new requests", status=503, retry_after=drain.seconds_left
        )


def served_name(llm: Generator, requested: str | None) -> str:
    """Return the served name of a request's model or LoRA adapter. By default, it is the model's first name.

    Raises RequestError (404) for unknown names.
    """
    if requested is None:
        return llm.served_names[0]
    if requested not in llm.served_names and requested not in llm.adapters:
        raise _unknown(requested, (*llm.served_names, *llm.adapters))
    return requested


def adapter_named(llm: Generator, name: str) -> str:
    """Return the LoRA adapter with a served name; "" if it is a name of the model."""
    return name if name in llm.adapters else ""


def _unknown(requested: str | None, names: Iterable[str]) -> RequestError:
    text = f"The model '{requested}' does not exist; this server has: {', '.join(names)}"
    return RequestError(text, field="model", status=404)
