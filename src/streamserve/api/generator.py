"""The interface of the engine that the routes use, independent of implementation and location."""

from collections.abc import AsyncGenerator, Mapping
from math import inf
from typing import Protocol

from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.fleet.scaling import AddedRole, Removal
from streamserve.fleet.view import RouterView
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import ModelInfo, Pooled, PromptLogprobs
from streamserve.protocol.reports import IncidentReport, Report
from streamserve.protocol.request_options import NO_OPTIONS, RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.chat import Renderer
from streamserve.text.message import NewReader
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.reranker import RerankScoring
from streamserve.text.tokenizer import Tokenizer

Item = ChoiceDelta | PromptLogprobs | Pooled | Usage


class Health(Protocol):
    """Whether requests can be served now. If they cannot, the reason and the expected wait."""

    @property
    def ready(self) -> bool: ...

    @property
    def detail(self) -> str: ...

    @property
    def missing(self) -> str:
        """The workers that do not serve although requests are served, and why; "" if there are none."""

    @property
    def retry_after(self) -> float | None:
        """The expected number of seconds until requests are served."""


class EnginePromptStream(Protocol):
    """A prompt stream in the engine.

    `ids` are the token ids that were last synced to it. The first `computed` of them have KV. `created` is
    when it was opened, by time.perf_counter.
    """

    @property
    def ids(self) -> list[int]: ...

    @property
    def computed(self) -> int: ...

    @property
    def created(self) -> float: ...

    async def edit(self, ids: list[int], tail: int) -> None:
        """Replace the prompt with `ids`. Their last `tail` tokens are expected to stay last.

        Raises RequestError if the request was lost.
        """

    def answer(
        self, ids: list[int], params: SamplingParams, reader: NewReader | None = None
    ) -> AsyncGenerator[Item, None]:
        """Finish the prompt as `ids` and generate, as Generator.submit does.

        For a prompt that is answered early, yields the current answer; raises PromptChanged when it becomes
        void.
        """

    async def finish(self) -> None:
        """Finish the prompt without changes, so that an early answer becomes final.

        Raises RequestError if the request was lost.
        """

    async def close(self) -> None:
        """Cancel the request unless it has ended."""


class Generator(Protocol):
    """A model that generates. `root` is its hub name or folder. `created` is its start time in Unix
    seconds."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> Renderer | None: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def task(self) -> str:
        """The model's task: generate, embed or score."""

    @property
    def embedding(self) -> EmbeddingConfig | None:
        """Settings of embeddings; None if the task is not to embed."""

    @property
    def scoring(self) -> RerankScoring | None:
        """Settings of scoring; None if the task is not to score."""

    @property
    def served_names(self) -> tuple[str, ...]: ...

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that requests may use, by name."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder in PEFT's layout, and serve it as `name`.

        Raises RequestError if it cannot be served, the name is in use, or too many are loaded.
        """

    async def unload_adapter(self, name: str) -> None:
        """Stop serving a LoRA adapter; its open requests run to completion.

        Raises RequestError (404) if there is no adapter with this name.
        """

    @property
    def root(self) -> str: ...

    @property
    def created(self) -> int: ...

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
        reader: NewReader | None = None,
    ) -> AsyncGenerator[Item, None]:
        """Yield deltas of `params.n` choices until all have finished, then the Usage. With `reader`, each
        choice is parsed as a chat reply.

        Raises RequestError before the first item if the request is refused. Closing the iterator cancels the
        request.
        """

    async def open(
        self,
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
        answer_early: bool = False,
        expected_tokens: int = 0,
    ) -> EnginePromptStream:
        """Open a prompt stream, empty at first.

        Unless `answer_early` is set, only `params.n` has an effect before the prompt is finished. Raises
        RequestError if no more requests are accepted, or if the parameters do not allow early answers.
        """

    def complete(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """Return `params` with a seed and a maximum length.

        Raises RequestError if the parameters or the prompt cannot be served.
        """

    async def check_grammar(self, grammar: Grammar, field: str) -> None:
        """Raise RequestError about `field` if outputs cannot be constrained by `grammar`."""

    def health(self) -> Health:
        """Return whether requests can be served."""

    def report(self) -> Report | None:
        """Return the workers' latest report, or None if there has been none."""

    def incidents(self) -> IncidentReport:
        """Return the incidents so far: worker crashes, and the requests suspected of causing them."""

    def routing(self) -> RouterView:
        """Return the present state of the workers, and recent routing decisions with their reasons."""

    async def add_workers(self, role: AddedRole, count: int = 1) -> tuple[str, ...]:
        """Start workers, and return their names. Raises RequestError if they cannot be added."""

    async def remove_workers(self, name: str, within: float = inf) -> Removal:
        """Remove a worker or pair once its requests have ended. Requests that are still open after `within`
        seconds continue on other workers.

        Raises RequestError if it cannot be removed.
        """

    async def drain(self, worker: str, draining: bool) -> int:
        """Drain a worker (send it no new requests), or resume it.

        Returns the number of open requests at the worker or at its partner in a stream pair. Raises
        RequestError (404) if there is no such worker.
        """
