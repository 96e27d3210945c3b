"""The outputs of a request's tasks, collected for a reply that is not streamed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, generate
from streamserve.api.generator import Generator, Item
from streamserve.api.http.memory import Charge
from streamserve.api.openai.replies import ChatReply, CompletionReply
from streamserve.api.openai.reply_size import REPEATED_BYTES, encoded
from streamserve.api.openai.scores import PromptScores, charge_delta, reply_charge
from streamserve.protocol.messages import FinishReason, PromptLogprobs
from streamserve.text.output import ChoiceDelta, TokenLogprob, Usage
from streamserve.text.reply_events import MergedEvents


@dataclass
class Piece:
    """The output of a choice: complete, or one delta."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None
    events: MergedEvents = field(default_factory=MergedEvents)
    called: bool = False

    def add(self, delta: ChoiceDelta) -> None:
        """Append the text, tokens and events of a delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish, self.stop, self.called = delta.finish, delta.stop, delta.called
        self.events.add(delta.events)


@dataclass
class GenerationOutput:
    """All output of a task."""

    task: GenerationTask
    choices: list[Piece]
    prompt_logprobs: PromptScores = field(default_factory=PromptScores)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def add(self, item: Item) -> None:
        """Add an item of the task: a delta of a choice, log-probabilities of the prompt, or the usage."""
        if isinstance(item, Usage):
            self.usage = item
        elif isinstance(item, PromptLogprobs):
            self.prompt_logprobs.append(item.entries)
        elif isinstance(item, ChoiceDelta):
            self.choices[item.choice].add(item)


def charged_reply(context: AppContext, tasks: Sequence[GenerationTask], whole: bool) -> Charge:
    """Return the charge for a reply to `tasks`, including log-probabilities of prompts; see
    scores.reply_charge."""
    return reply_charge(
        context.memory,
        [task.params for task in tasks],
        [len(task.prompt.ids) for task in tasks],
        context.llm.model.max_model_len,
        whole,
    )


async def collect(
    context: AppContext,
    tasks: Sequence[GenerationTask],
    write: Callable[[list[GenerationOutput]], CompletionReply | ChatReply],
    repeated: int = 0,
) -> bytes:
    """Run all tasks to their end; return the reply that `write` builds from their outputs, as JSON.

    `repeated` is the number of characters of prompts in the reply (reply_size.py). A large reply is built and
    encoded outside of the event loop.
    """
    outputs = [GenerationOutput(task, [Piece() for _ in range(task.params.n)]) for task in tasks]
    with charged_reply(context, tasks, whole=True) as charge:
        charge.add(REPEATED_BYTES * repeated)

        async def collect_item(task: GenerationTask, item: Item) -> None:
            if isinstance(item, ChoiceDelta):
                charge_delta(charge, item)
            outputs[task.number].add(item)

        await generate(context, tasks, collect_item)
        return await context.side_thread.run_if(charge.held > _LARGE_REPLY, lambda: encoded(write(outputs)))


_LARGE_REPLY = 256 << 10
"""A reply with a larger charge, in bytes, takes more than a millisecond to encode."""


@dataclass(frozen=True)
class ReplyHead:
    """The fields at the start of every reply to a request."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def head_of(request_id: str, llm: Generator, model: str) -> ReplyHead:
    """Return the head for a request that has just arrived."""
    adapter = llm.adapters.get(model)
    fingerprint = llm.model.fingerprint_with(adapter.fingerprint if adapter else "")
    return ReplyHead(request_id, int(time.time()), model, fingerprint)
