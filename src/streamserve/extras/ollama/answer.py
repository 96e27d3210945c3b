"""The output of one request: its parts in Ollama's form, as one reply or as the lines of a stream."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, generate, new_id
from streamserve.api.generator import Item
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.sse import Emit
from streamserve.api.openai.call_arguments import arguments_object
from streamserve.api.openai.conversation import Conversation
from streamserve.api.openai.field_names import renamed
from streamserve.api.openai.logprobs import chat_logprobs
from streamserve.api.openai.options import options_of
from streamserve.api.openai.output_parser import OutputParser
from streamserve.api.openai.outputs import charged_reply
from streamserve.api.openai.replies import ChatLogprob
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.scores import charge_delta
from streamserve.api.routes import json_response
from streamserve.extras.ollama.durations import RequestStopwatch
from streamserve.extras.ollama.json_lines import JsonLines
from streamserve.extras.ollama.schemas import OllamaCall, OllamaFunction, OllamaReply
from streamserve.protocol.errors import RequestError
from streamserve.text.output import ChoiceDelta, TokenLogprob, Usage


@dataclass
class AnswerPart:
    """The next part of an answer, or all of it."""

    content: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    def add(self, part: "AnswerPart") -> None:
        self.content += part.content
        self.thinking += part.thinking
        self.calls += part.calls
        self.logprobs += part.logprobs


Reply = Callable[[AnswerPart, dict[str, Any]], OllamaReply]
"""Builds a reply, or a line of a stream, from a part of an answer and the fields that all routes have in
common."""


class AnswerSink:
    """Receives the parts of an output (OutputSink), and passes them to `emit`. A call is passed on when it is
    whole, or at the end of the output. `scored`: pass on log-probabilities, too."""

    def __init__(self, emit: Callable[[AnswerPart], Awaitable[None]], scored: bool) -> None:
        self._emit = emit
        self._scored = scored
        self._calls = 0
        self._open: tuple[str, str] | None = None
        self._arguments: list[str] = []

    async def text(self, text: str, logprobs: Iterable[TokenLogprob] = ()) -> None:
        """Pass on text of the message."""
        scores = chat_logprobs(logprobs, packed=True).content if self._scored else []
        if text or scores:
            await self._emit(AnswerPart(content=text, logprobs=scores))

    async def reasoning(self, text: str) -> None:
        if text:
            await self._emit(AnswerPart(thinking=text))

    async def call(self, call_id: str, name: str) -> None:
        """Open a call; its arguments follow."""
        self._open = (call_id, name)

    async def arguments(self, text: str) -> None:
        """Append text to the arguments of the latest call."""
        self._arguments.append(text)

    async def call_end(self) -> None:
        await self.close()

    async def close(self) -> None:
        """Pass on the open call, if there is one."""
        if self._open is None:
            return
        (call_id, name), arguments = self._open, arguments_object("".join(self._arguments))
        function = OllamaFunction(index=self._calls, name=name, arguments=arguments)
        self._calls, self._open, self._arguments = self._calls + 1, None, []
        await self._emit(AnswerPart(calls=[OllamaCall(id=call_id, function=function)]))


@dataclass
class OllamaGeneration:
    """Generates the answer to one request.

    `body` is the chat request into which it was converted, `model` the model's name in the reply. `names`
    maps fields of the chat request to Ollama's names, for errors.
    """

    context: AppContext
    body: ChatRequest
    conversation: Conversation
    stopwatch: RequestStopwatch
    model: str
    reply: Reply
    names: Mapping[str, str]

    async def respond(self, request: Request, served: str) -> Response:
        """Return the reply, whole or as a stream of lines. `served` is the served name of the model. Raises
        RequestError if generation fails."""
        options = options_of(self.context, request, self.body, served)
        conversation = self.conversation
        prompt, params, reader = conversation.prompt, conversation.params, conversation.reader
        task = GenerationTask(0, new_id("ollama"), prompt, params, options, reader=reader)
        if self.body.stream:
            return JsonLines(lambda emit: self._stream(task, emit))
        return json_response(await while_connected(request.receive, self._whole(task)))

    async def _stream(self, task: GenerationTask, emit: Emit) -> None:
        async def send(part: AnswerPart) -> None:
            await emit(self._line(part, done=False))

        last = await self._run(task, AnswerSink(send, self.body.logprobs), whole=False)
        await emit(self._line(AnswerPart(), done=True, **last))

    async def _whole(self, task: GenerationTask) -> OllamaReply:
        whole = AnswerPart()

        async def collect(part: AnswerPart) -> None:
            whole.add(part)

        last = await self._run(task, AnswerSink(collect, self.body.logprobs), whole=True)
        return self._line(whole, done=True, **last)

    async def _run(self, task: GenerationTask, answer: AnswerSink, whole: bool) -> dict[str, Any]:
        """Generate, passing the output to `answer`; return the fields of the end. Raises RequestError with
        the names of Ollama's fields."""
        parser = OutputParser(answer)

        async def handle(task: GenerationTask, item: Item) -> None:
            if isinstance(item, Usage):
                parser.usage = item
            elif isinstance(item, ChoiceDelta):
                self.stopwatch.token()
                if whole:
                    charge_delta(charge, item)
                await parser.delta(item)

        self.stopwatch.submit()
        try:
            with charged_reply(self.context, [task], whole=whole) as charge:
                await generate(self.context, [task], handle)
                await answer.close()
        except RequestError as error:
            raise renamed(error, self.names) from error
        return {"done_reason": parser.finish, **self.stopwatch.generating(parser.usage)}

    def _line(self, part: AnswerPart, done: bool, **fields: Any) -> OllamaReply:
        common = {"model": self.model, "created_at": datetime.now(UTC), "done": done, **fields}
        return self.reply(part, common)
