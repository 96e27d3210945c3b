"""The LoRA adapters that an engine's executor has loaded, and the results of requests to load adapters."""

from typing import Protocol

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import AdapterLoaded, LoadAdapter, UnloadAdapter


class Adapters(Protocol):
    """The adapters of an executor, by the hash of their files."""

    def __contains__(self, fingerprint: str) -> bool: ...

    def load(self, fingerprint: str, path: str) -> None:
        """Load the adapter in the folder `path`. Raises CheckpointError if it cannot be served."""

    def unload(self, fingerprint: str) -> None:
        """Free an adapter. Unknown ones are ignored."""


class AdapterManager:
    """Loads and unloads adapters between an engine's steps. Without `adapters`, the executor supports
    none."""

    def __init__(self, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self._answers: list[AdapterLoaded] = []
        self._loaded: set[str] = set()

    def refusal(self, adapter: str) -> str:
        """Return why a request with this adapter cannot run here; empty if it can."""
        if not adapter or (self._adapters is not None and adapter in self._adapters):
            return ""
        return "this worker does not have the request's LoRA adapter: load the adapter again"

    def load(self, message: LoadAdapter) -> None:
        """Load an adapter, and add the answer for `take_answers`."""
        error = ""
        if self._adapters is None:
            error = "this worker serves no LoRA adapters: start it with --max-loras"
        else:
            try:
                self._adapters.load(message.fingerprint, message.path)
                self._loaded.add(message.fingerprint)
            except CheckpointError as failure:
                error = str(failure)
        self._answers.append(AdapterLoaded(message.fingerprint, error))

    def unload(self, message: UnloadAdapter) -> None:
        self._loaded.discard(message.fingerprint)
        if self._adapters is not None:
            self._adapters.unload(message.fingerprint)

    def unload_all(self) -> None:
        """Free all adapters that were loaded by `load`, and drop their answers."""
        for fingerprint in self._loaded:
            if self._adapters is not None:
                self._adapters.unload(fingerprint)
        self._loaded = set()
        self._answers = []

    def take_answers(self) -> list[AdapterLoaded]:
        """Return the answers to `load` since the last call."""
        answers, self._answers = self._answers, []
        return answers
