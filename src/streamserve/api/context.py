"""The context of every route: the models, and the resources that all requests share."""

import sys
from dataclasses import dataclass, field, replace

from streamserve.api.generator import Generator
from streamserve.api.http.descriptors import Descriptors, client_descriptors
from streamserve.api.http.drain import RequestGate
from streamserve.api.http.json_scan import MAX_VALUES, MIN_CHARACTERS
from streamserve.api.http.memory import MemoryAccount
from streamserve.api.http.side_thread import SideThread
from streamserve.api.metrics.metrics import Metrics
from streamserve.api.model_table import ModelEntry, ModelTable
from streamserve.api.settings import ApiSettings


@dataclass(frozen=True)
class AppContext:
    """The application context that every route needs.

    - `model`: the model that the request names; the default model until that is known (leases.py).
    - `side_thread`: runs work that takes more than a few milliseconds.
    - `grammar_thread`: converts grammars. A conversion may take a second; in a separate thread, conversions
      delay only each other.
    """

    models: ModelTable
    model: ModelEntry
    memory: MemoryAccount
    descriptors: Descriptors = field(default_factory=client_descriptors)
    drain: RequestGate = field(default_factory=RequestGate)
    side_thread: SideThread = field(default_factory=SideThread)
    grammar_thread: SideThread = field(default_factory=SideThread)

    @property
    def llm(self) -> Generator:
        """The engine of the model."""
        return self.model.llm

    @property
    def settings(self) -> ApiSettings:
        return self.model.settings

    @property
    def metrics(self) -> Metrics:
        return self.model.metrics

    def of(self, name: str) -> "AppContext":
        """Return the context of the model with this name in the table."""
        return replace(self, model=self.models.entries[name])

    def cache_salt(self, caller: str, requested: str | None) -> str:
        """Return the cache salt of a caller's request with the salt `requested`. With several tenants, each
        has separate cached prefixes, unless the operator lets them share prefixes."""
        salt = requested or ""
        if self.settings.share_prefixes or not self.settings.several_tenants:
            return salt
        return f"{caller}\0{salt}"

    @property
    def max_body_bytes(self) -> int:
        """The maximum size of a request's body, in bytes."""
        return self.settings.max_body_bytes

    @property
    def max_values(self) -> int:
        """The maximum number of JSON values in a request: prompts of token ids may fill the context."""
        return max([MAX_VALUES, *(2 * length for length, _ in self.models.context_lengths())])

    @property
    def max_characters(self) -> int:
        """The maximum number of characters in a string of a request: no prompt that fits in the context is
        longer. All other strings have far lower limits."""
        longest = [length * llm.tokenizer.longest_token for length, llm in self.models.context_lengths()]
        return max([MIN_CHARACTERS, *longest]) if longest else sys.maxsize
