"""What the routes need of an engine, whichever it is and wherever it runs."""

from collections.abc import AsyncGenerator
from typing import Protocol

from streamserve.control.view import RouterView
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import ModelInfo, PromptLogprobs, Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.chat import ChatTemplate
from streamserve.text.output import Delta, Usage
from streamserve.text.tokenizer import Tokenizer

Item = Delta | PromptLogprobs | Usage


class Health(Protocol):
    """Whether requests can be served now, and if not, why."""

    @property
    def ready(self) -> bool: ...

    @property
    def detail(self) -> str: ...


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

    async def check_grammar(self, grammar: Grammar, field: str) -> None:
        """Raises RequestError about `field` if outputs cannot be held to `grammar`."""

    def health(self) -> Health: ...

    def report(self) -> Report | None:
        """The worker's latest report, if there has been one."""

    def routing(self) -> RouterView:
        """The workers now, and why recent requests went where they did."""
