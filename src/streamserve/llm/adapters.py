"""The LoRA adapters that requests may name: loaded at the start or while serving, and unloaded while
serving."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from streamserve.fleet.runtime import FleetRuntime
from streamserve.protocol.adapters import Adapter, check_name, folder_of, open_adapter
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError, RequestError

LOAD_SECONDS = 120.0
"""Seconds that workers may take to load an adapter while they serve."""


class ServedAdapters:
    """The LoRA adapters, by name, of a model with the names `models`. At most `limit` adapters are loaded,
    including removed ones that open requests still use. `config` has the limits."""

    def __init__(
        self,
        given: Mapping[str, str],
        models: Sequence[str],
        config: ModelConfig,
        runtime: Callable[[], FleetRuntime],
    ) -> None:
        """Open the adapters of the start: `given` maps their names to folders. Raises CheckpointError if one
        cannot be read."""
        self._open = partial(open_adapter, max_rank=config.max_lora_rank, max_bytes=config.max_lora_bytes)
        self.by_name: dict[str, Adapter] = {name: self._open(name, path) for name, path in given.items()}
        self._models = tuple(models)
        self._limit = config.max_loras
        self._runtime = runtime
        self._changing = asyncio.Lock()
        self._checked = False

    def named(self, name: str) -> str:
        """Return the fingerprint of an adapter; "" for an empty name. Raises RequestError (404) for unknown
        names."""
        if name and name not in self.by_name:
            names = ", ".join(self.by_name) or "none"
            raise RequestError(
                f"The LoRA adapter '{name:.200}' does not exist; loaded are: {names}",
                field="model",
                status=404,
            )
        return self.by_name[name].fingerprint if name else ""

    async def until_loaded(self) -> None:
        """Wait until all workers have loaded the adapters of the start. Raises CheckpointError if one cannot
        be served."""
        if self._checked:
            return
        for adapter in list(self.by_name.values()):
            error = await self._runtime().adapter_settled(adapter.fingerprint)
            if error:
                raise CheckpointError(error)
        self._checked = True

    async def load(self, name: str, path: str) -> Adapter:
        """Load the adapter in the folder `path` at all workers, and serve it as `name`.

        Raises RequestError if it cannot be served, the name is in use, or too many are loaded.
        """
        async with self._changing:
            return await self._load_new(name, path)

    async def ensure(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path` as `name`, unless it is loaded. An empty `path` stands for a
        loaded adapter. Raises RequestError as `load` and `named` do, and if another folder has this name."""
        async with self._changing:
            if not path:
                self.named(name)
            elif name not in self.by_name:
                await self._load_new(name, path)
            elif folder_of(self.by_name[name].path).resolve() != folder_of(path).resolve():
                raise RequestError(
                    f"the name {name:.200} is used by the LoRA adapter in {self.by_name[name].path}: give "
                    "the other one another name",
                    field="lora_name",
                )

    async def _load_new(self, name: str, path: str) -> Adapter:
        if not self._limit:
            raise RequestError(
                f"no LoRA adapters are served for {self._models[0]}: start the server with max_loras"
            )
        refusal = check_name(name, frozenset((*self._models, *self.by_name)))
        if refusal:
            raise RequestError(f"lora_name: {refusal}", field="lora_name")
        try:
            adapter = await asyncio.to_thread(self._open, name, path)
        except CheckpointError as error:
            raise RequestError(str(error), field="lora_path", status=404) from error
        runtime = self._runtime()
        if len(runtime.adapters | {adapter.fingerprint}) > self._limit:
            raise RequestError(
                f"{len(runtime.adapters)} adapters are loaded, which is the limit (max_loras): unload "
                "an adapter, and wait until its open requests have ended",
                status=409,
            )
        refusal = await self._load(adapter)
        if refusal:
            await self._forget(adapter)
            raise RequestError(refusal, field="lora_path")
        self.by_name[name] = adapter
        return adapter

    async def _load(self, adapter: Adapter) -> str:
        """Load an adapter; return why it cannot be served, or "". Raises RequestError (503) if the workers do
        not answer in time."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                return await self._runtime().load_adapter(adapter)
        except TimeoutError:
            await self._forget(adapter)
            raise RequestError(
                f"the workers have not loaded the adapter within {LOAD_SECONDS:g} seconds", status=503
            ) from None

    async def unload(self, name: str) -> None:
        """Stop serving an adapter: requests that name it are refused, open ones run to completion. Raises
        RequestError (404) if there is no adapter with this name."""
        async with self._changing:
            self.named(name)
            if not name:
                raise RequestError("lora_name is empty", field="lora_name")
            await self._forget(self.by_name.pop(name))

    async def _forget(self, adapter: Adapter) -> None:
        """Unload an adapter's files, unless another name uses the same files."""
        if adapter.fingerprint not in {other.fingerprint for other in self.by_name.values()}:
            await self._runtime().unload_adapter(adapter.fingerprint)
