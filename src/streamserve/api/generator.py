"""What the routes need of an engine, whichever it is and wherever it runs."""

from collections.abc import AsyncGenerator
from typing import Protocol

from streamserve.fleet.view import RouterView
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import ModelInfo, PromptLogprobs
from streamserve.protocol.reports import IncidentReport, Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.chat import ChatTemplate
from streamserve.text.output import Delta, Usage
from streamserve.text.tokenizer import Tokenizer

Item = Delta | PromptLogprobs | Usage


class Health(Protocol):
    """Whether requests can be served now, and if not, why, and when they will be."""

    @property
    def ready(self) -> bool: ...

    @property
    def detail(self) -> str: ...

    @property
    def retry_after(self) -> float | None:
        """In how many seconds requests are expected to be served."""


class ArrivingPrompt(Protocol):
    """A prompt that is still arriving, in the engine. `ids` is what it was last told, `computed` how many of
    them have KV, `created` when it was opened, by time.perf_counter."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def computed(self) -> int: ...

    @property
    def created(self) -> float: ...

    async def edit(self, ids: list[int], tail: int) -> None:
        """The prompt is now `ids`, of which the last `tail` are expected to stay last. Raises RequestError
        if the request was lost."""

    def answer(self, ids: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        """Finish the prompt as `ids` and generate, as Generator.submit does. Of a prompt that is answered
        early, the answer as it stands; raises PromptChanged when that is void."""

    async def finish(self) -> None:
        """An early answer stands: nothing changes any more. Raises RequestError if the request was lost."""

    async def close(self) -> None:
        """Cancel what is not over."""


class Generator(Protocol):
    """A model that generates. `root` is its hub name or folder, `created` when it was started, in Unix
    seconds."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def served_names(self) -> tuple[str, ...]: ...

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
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Item, None]:
        """Generate: deltas of `params.n` choices until each has finished, then the usage.

        Raises RequestError before the first item if the request is refused. Closing it cancels the request.
        """

    async def open(
        self,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        answer_early: bool = False,
    ) -> ArrivingPrompt:
        """A prompt that is still arriving, empty at first; unless it is answered early, only `params.n`
        counts before it is finished. Raises RequestError if no more requests are taken, or if it cannot be
        answered early."""

    def complete(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """`params` with a seed and a length. Raises RequestError if they or the prompt cannot be served."""

    async def check_grammar(self, grammar: Grammar, field: str) -> None:
        """Raises RequestError about `field` if outputs cannot be held to `grammar`."""

    def health(self) -> Health: ...

    def report(self) -> Report | None:
        """The worker's latest report, if there has been one."""

    def incidents(self) -> IncidentReport:
        """What went wrong so far: deaths of workers, requests that were suspected of them."""

    def routing(self) -> RouterView:
        """The workers now, and why recent requests went where they did."""

    async def rest(self, worker: str, draining: bool) -> int:
        """Give a worker no new requests, or give it some again; returns how many are open at it, or at the
        other half of its pair. Raises RequestError (404) if there is no such worker."""
