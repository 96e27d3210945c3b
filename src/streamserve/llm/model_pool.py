"""Models that are loaded for requests within a memory budget, and unloaded when other models need the memory.

           acquire                ready          no request, and idle, another, or `unload`
not loaded ───────▶ loading ─────────────▶ loaded ─────────────────────────────────────▶ unloading
    ▲                  │ failure                                                             │
    └──────────────────┴─────────────────────────────────────────────────────────────────────┘
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from streamserve.llm.residency import Idle, to_unload
from streamserve.protocol.errors import CheckpointError, FleetError, RequestError, StartError

State = Literal["not loaded", "loading", "loaded", "unloading"]

LOAD_TIMEOUT = 120.0
"""Default seconds that a request waits for its model."""
MEMORY_TIMEOUT = 10.0
"""Default for the part of the load timeout in which busy models may become idle, in seconds."""
RETRY_SECONDS = 10.0
"""Seconds after a failed load in which requests get its error, and no further load is attempted."""

_BUSY_RETRY = 5.0

_log = logging.getLogger(__name__)


class Loadable(Protocol):
    """A model that can be loaded and unloaded repeatedly."""

    async def start(self) -> None:
        """Load the model. Raises CheckpointError, StartError or FleetError if that fails."""

    async def unload(self) -> None:
        """Free the model's memory; a no-op if it is not loaded."""

    async def until_failed(self) -> None:
        """Wait until the loaded model has failed for good. Raises FleetError."""


@dataclass(eq=False)
class PooledModel:
    """One model of a pool: how to load it, its size, and its state.

    - `size`: the memory that it takes, in bytes.
    - `idle_seconds`: seconds without a request after which it is unloaded; None: only if other models need
      its memory.
    - `users`: number of requests and prompt streams that use it.
    - `waiting`: requests that wait for it, with the times at which they began to wait; the oldest first.
    """

    name: str
    model: Loadable
    size: int
    idle_seconds: float | None = None
    state: State = "not loaded"
    users: int = 0
    last_used: float = 0.0
    waiting: dict[asyncio.Future[None], float] = field(default_factory=dict)
    loads: int = 0
    unloads: int = 0
    load_seconds: float = 0.0
    failure: Exception | None = None
    failed_at: float = 0.0
    loading: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None


class ModelPool:
    """The models of one server, in one event loop. End it with `close`."""

    def __init__(
        self,
        models: Sequence[PooledModel],
        budget: int,
        load_timeout: float = LOAD_TIMEOUT,
        memory_timeout: float = MEMORY_TIMEOUT,
        max_waiting: int = 1024,
    ) -> None:
        """Create a pool. Each model must fit `budget` bytes. `max_waiting` limits the requests that wait for
        one model."""
        self.models = {model.name: model for model in models}
        self.budget = budget
        self._load_timeout = load_timeout
        self._memory_timeout = memory_timeout
        self._max_waiting = max_waiting
        self._unloading: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        self._closing = False

    @property
    def used(self) -> int:
        """The bytes of all models that are not unloaded."""
        return sum(model.size for model in self.models.values() if model.state != "not loaded")

    async def acquire(self, name: str, patient: bool = False) -> None:
        """Wait until a model is loaded, and keep it loaded until `release`.

        Raises RequestError: 429 if too many requests wait for it; 503 if it cannot be loaded, or not in time
        (`patient`: without a time limit).
        """
        model = self.models[name]
        self._refuse(model)
        if model.state == "loaded":
            model.users += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        model.waiting[waiter] = time.monotonic()
        self._advance()
        try:
            if not patient:
                await self._in_time(model, waiter)
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(name)  # the model was loaded just when this call was cancelled
            raise
        finally:
            model.waiting.pop(waiter, None)

    async def _in_time(self, model: PooledModel, waiter: asyncio.Future[None]) -> None:
        """Wait for `waiter`. Raises RequestError (503) if memory does not become free in time, or if loading
        takes too long."""
        await asyncio.wait({waiter}, timeout=min(self._memory_timeout, self._load_timeout))
        if waiter.done():
            return
        if model.state == "not loaded" and not self._unloading:
            busy = ", ".join(each.name for each in self.models.values() if each.users)
            text = (
                f"models that are in use have taken its memory for {self._memory_timeout:g} seconds: {busy}"
            )
        else:
            await asyncio.wait({waiter}, timeout=max(0.0, self._load_timeout - self._memory_timeout))
            if waiter.done():
                return
            text = f"loading takes longer than {self._load_timeout:g} seconds (load_timeout)"
        raise RequestError(
            f"the model {model.name!r} is not loaded: {text}", status=503, retry_after=_BUSY_RETRY
        )

    def release(self, name: str) -> None:
        """End one `acquire` of a model."""
        model = self.models[name]
        model.users -= 1
        model.last_used = time.monotonic()
        if not model.users:
            self._expire_later(model)
            self._advance()

    def unload(self, name: str) -> None:
        """Begin to unload a model; a no-op if it is not loaded. Raises RequestError (409) if it is being
        loaded or in use."""
        model = self.models[name]
        if model.state == "loading":
            raise RequestError(f"the model {name!r} is being loaded", status=409)
        if model.users:
            text = f"the model {name!r} is in use: open requests and prompt streams: {model.users}"
            raise RequestError(text, status=409)
        if model.state == "loaded":
            self._unload(model)

    async def until_failed(self) -> None:
        """Wait until a loaded model has failed for good. Raises FleetError."""
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._failed)

    async def load(self, name: str) -> None:
        """Load a model. Raises CheckpointError, StartError or FleetError if that fails."""
        try:
            await self.acquire(name, patient=True)
        except RequestError as error:
            raise self.models[name].failure or error from None
        self.release(name)

    async def close(self) -> None:
        """Unload all models, and refuse the waiting requests."""
        self._closing = True
        for model in self.models.values():
            self._refuse_waiting(model, _shutting_down)
            if model.expiry:
                model.expiry.cancel()
        models = self.models.values()
        ending = [task for model in models for task in (model.loading, model.watch) if task]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, *self._unloading, return_exceptions=True)
        await asyncio.gather(*(model.model.unload() for model in models))

    def _refuse(self, model: PooledModel) -> None:
        """Raise RequestError if requests cannot wait for a model now."""
        if self._closing:
            raise _shutting_down()
        left = model.failed_at + RETRY_SECONDS - time.monotonic()
        if model.failure and model.state == "not loaded" and left > 0:
            raise _cannot_load(model, left)
        if len(model.waiting) >= self._max_waiting:
            raise RequestError(
                f"{self._max_waiting} requests wait for the model {model.name!r}, which is the limit",
                status=429,
                retry_after=_BUSY_RETRY,
            )

    def _advance(self) -> None:
        """Load the models that requests wait for, in the order of their oldest requests. Unload idle models
        for them.

        A model waits if not enough others are idle; later models in this order may then be loaded before
        it.
        """
        if self._closing:
            return
        wanted = [model for model in self.models.values() if model.waiting and model.state == "not loaded"]
        promised = 0
        for model in sorted(wanted, key=lambda each: min(each.waiting.values())):
            missing = promised + model.size - (self.budget - self.used)
            if missing <= 0:
                model.state = "loading"
                model.loading = asyncio.get_running_loop().create_task(self._load(model))
            elif self._unload_idle(missing):
                promised += model.size

    def _unload_idle(self, missing: int) -> bool:
        """Unload idle models so that `missing` bytes become free. Return False, without unloading any, if
        they are not enough."""
        coming = sum(each.size for each in self.models.values() if each.state == "unloading")
        idle = [
            Idle(each.name, each.size, each.last_used)
            for each in self.models.values()
            if each.state == "loaded" and not each.users
        ]
        chosen = to_unload(missing - coming, idle)
        for each in chosen or ():
            self._unload(self.models[each.name])
        return chosen is not None

    async def _load(self, model: PooledModel) -> None:
        started = time.monotonic()
        _log.info("loading %s", model.name)
        try:
            await model.model.start()
        except Exception as error:
            await self._give_up(model, error)
        else:
            now = time.monotonic()
            model.load_seconds, model.last_used, model.failure = now - started, now, None
            model.loads += 1
            model.state = "loaded"
            _log.info("loaded %s in %.1f s", model.name, model.load_seconds)
            model.watch = asyncio.get_running_loop().create_task(self._watch(model))
            self._admit(model)
            self._expire_later(model)
        model.loading = None
        self._advance()

    async def _give_up(self, model: PooledModel, error: Exception) -> None:
        """End a failed load, and refuse the requests that wait for the model."""
        expected = isinstance(error, CheckpointError | StartError | FleetError | OSError)
        _log.error("%s cannot be loaded: %s", model.name, error, exc_info=None if expected else error)
        await model.model.unload()
        model.state, model.failure, model.failed_at = "not loaded", error, time.monotonic()
        self._refuse_waiting(model, partial(_cannot_load, model, RETRY_SECONDS))

    def _admit(self, model: PooledModel) -> None:
        """Start the requests that wait for a model."""
        for waiter in model.waiting:
            if not waiter.done():
                model.users += 1
                waiter.set_result(None)
        model.waiting.clear()

    def _unload(self, model: PooledModel) -> None:
        model.state = "unloading"
        model.unloads += 1
        if model.watch:
            model.watch.cancel()
        task = asyncio.get_running_loop().create_task(self._free(model))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _free(self, model: PooledModel) -> None:
        _log.info("unloading %s", model.name)
        await model.model.unload()
        model.state = "not loaded"
        self._advance()

    async def _watch(self, model: PooledModel) -> None:
        """Pass the failure of a loaded model on to `until_failed`."""
        try:
            await model.model.until_failed()
        except FleetError as error:
            if self._failed is None:
                self._failed = asyncio.get_running_loop().create_future()
            if not self._failed.done():
                self._failed.set_exception(error)

    def _expire_later(self, model: PooledModel) -> None:
        """Schedule a check of a model for the time at which it may have been idle for long enough to unload
        it."""
        if model.idle_seconds is None or model.expiry is not None or self._closing:
            return
        left = max(0.0, model.last_used + model.idle_seconds - time.monotonic())
        model.expiry = asyncio.get_running_loop().call_later(left, self._expire, model)

    def _expire(self, model: PooledModel) -> None:
        model.expiry = None
        if model.state != "loaded" or model.users:
            return
        assert model.idle_seconds is not None
        if time.monotonic() < model.last_used + model.idle_seconds:
            self._expire_later(model)
        else:
            self._unload(model)

    def _refuse_waiting(self, model: PooledModel, error: Callable[[], RequestError]) -> None:
        for waiter in model.waiting:
            if not waiter.done():
                waiter.set_exception(error())
        model.waiting.clear()


def _cannot_load(model: PooledModel, retry_after: float) -> RequestError:
    text = f"the model {model.name!r} cannot be loaded: {model.failure}"
    return RequestError(text, status=503, retry_after=retry_after)


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503, retry_after=5.0)
