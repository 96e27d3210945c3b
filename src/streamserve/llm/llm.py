"""Library for scripts: `LLM("embedded").generate(["Hello"])`, with results in vLLM's format."""

import asyncio
import logging
import operator
import threading
import weakref
from collections.abc import Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

from streamserve.fleet.worker_process import may_use_gpu, prepared_fork_server
from streamserve.llm.async_llm import AsyncLLM, new_request_id
from streamserve.llm.items import Item
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import ModelInfo, Pooled, PromptLogprobs
from streamserve.protocol.reports import Report
from streamserve.protocol.request_options import RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.options import Settings
from streamserve.settings.resolve import resolve
from streamserve.text.chat import require
from streamserve.text.embedding import Floats, embedding, embedding_params
from streamserve.text.latency import SloOutcome
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.prompt_text import PromptText
from streamserve.text.rendering import render_conversation
from streamserve.text.tokenizer import Tokenizer

T = TypeVar("T")
_log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""Upper bound of the seconds that a worker takes to stop or to be killed."""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at a position, and its text."""

    logprob: float
    decoded_token: str


@dataclass
class CompletionOutput:
    """One output choice. `logprobs[i]` maps token ids to log-probabilities at output position i."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """The result for one prompt. `prompt_logprobs[0]` is None, as the first token has no predecessor.
    `pooled` is the vector of a request with `pooling`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    slo: SloOutcome | None = None
    pooled: bytes = b""
    finished: bool = False


Prompt = str | Sequence[int]


def _run_and_close(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(_cancel_all())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _cancel_all() -> None:
    """Cancel the tasks that interrupted calls have left in the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _shut_down(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Stop the workers, then the loop.

    The wait is bounded: an LLM may be garbage-collected in the loop's thread, or in a thread that holds a
    lock which the loop needs. Does nothing in a forked process, which does not have the loop's thread.
    """
    if not thread.is_alive():
        return
    closing = asyncio.run_coroutine_threadsafe(llm.close(), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:
        closing.result(CLOSE_SECONDS)
        thread.join()


class LLM:
    """A model for scripts: `LLM("embedded").generate(["Hello"])`.

    Close it, or use it in a `with` block, to free its memory; otherwise it is closed when it is
    garbage-collected, or at the latest at interpreter exit.

    Takes the settings of `streamserve generate` as keyword arguments. Raises SettingsError for an invalid
    setting, CheckpointError for a model that cannot be served, StartError if the worker exits before it is
    ready.
    """

    def __init__(self, model: str | None = None, *, config: str | None = None, **settings: Any) -> None:
        self._start(resolve(model, settings, config, use="llm"))

    @classmethod
    def from_settings(cls, settings: Settings) -> "LLM":
        """Create an LLM from settings that are already resolved."""
        llm = cls.__new__(cls)
        llm._start(settings)
        return llm

    def _start(self, settings: Settings) -> None:
        server = settings.server
        forked = server.fork_workers and not may_use_gpu(settings.model.device)
        with prepared_fork_server(forked and server.launcher == "local"):
            self._start_workers(settings)

    def _start_workers(self, settings: Settings) -> None:
        self._llm = AsyncLLM(settings)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_and_close, args=(self._loop,), name="streamserve", daemon=True)
        thread.start()
        try:
            self._thread = thread
            self._run(self._llm.start()).result()
        except BaseException:
            _shut_down(self._llm, self._loop, thread)
            raise
        # At interpreter exit, finalizers run newest first. This one needs the socket, so it must run before
        # the finalizer that closes the socket, and is created after it.
        self._shut_down = weakref.finalize(self, _shut_down, self._llm, self._loop, thread)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def model(self) -> ModelInfo:
        return self._llm.model

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """The sampling values that the checkpoint's generation_config.json recommends: fields of
        SamplingParams. They apply to calls without `params`, as they do to the server's requests. To use them
        with other values, pass `SamplingParams(**llm.default_sampling, max_tokens=64)`."""
        return self._llm.default_sampling

    def report(self) -> Report | None:
        """Return the workers' latest report."""
        return self._llm.report()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Generate outputs for texts or lists of token ids, in the order of `prompts`.

        With `use_tqdm`, standard error shows the progress of several prompts.

        `params`, `priority` (lower is served first) and `lora` (the name of a LoRA adapter, "" for none) are
        one value for all prompts, or one per prompt. Without `params`, `default_sampling` applies; if
        `params` are given, the checkpoint's values are not used.

        Raises RequestError for the first prompt that is refused, or that repeatedly crashes its worker;
        StartError while no worker can be started.
        """
        prompt_list = _as_list(prompts)
        count = len(prompt_list)
        if isinstance(params, Sequence):
            params_list = list(params)
        else:
            params_list = [params or SamplingParams(**self.default_sampling)] * count
        if len(params_list) != count:
            raise ValueError(f"{count} prompts, but {len(params_list)} sampling parameters")
        priorities = [priority] * count if isinstance(priority, int) else list(priority)
        if len(priorities) != count:
            raise ValueError(f"{count} prompts, but {len(priorities)} priorities")
        adapters = [lora] * count if isinstance(lora, str) else list(lora)
        if len(adapters) != count:
            raise ValueError(f"{count} prompts, but {len(adapters)} LoRA adapters")
        requests = list(zip(prompt_list, params_list, priorities, adapters, strict=True))
        future = self._run(self._generate(requests, use_tqdm))
        try:
            return future.result()
        except BaseException:  # on any error, including Ctrl-C, cancel all requests of this call
            future.cancel()
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Generate for one or several conversations, rendered with the chat template; see `generate`.

        Without `params`, an output may fill the context.
        """
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render(chat) for chat in chats]  # type: ignore[arg-type]
        params = params or SamplingParams(**self.default_sampling, max_tokens=None)
        return self.generate(prompts, params, use_tqdm=use_tqdm, priority=priority, lora=lora)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, use_tqdm: bool = True
    ) -> list[Floats]:
        """Return the embeddings of texts or lists of token ids, in the order of `prompts`. Each has its first
        `dimensions` numbers (None: all).

        Raises RequestError if the model does not embed (task), and as `generate` does.
        """
        config = self._llm.embedding
        if config is None:
            raise RequestError('this model does not embed: give task="embed"', field="model")
        outputs = self.generate(prompts, embedding_params(config), use_tqdm=use_tqdm)
        return [embedding(output.pooled, config, dimensions) for output in outputs]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora: str = ""
    ) -> Generator[ChoiceDelta, None, None]:
        """Yield deltas of one prompt's output as they are generated. `lora` is the name of a LoRA adapter, ""
        for none. Without `params`, `default_sampling` applies.

        Leaving the loop early cancels the request.
        """
        queue: asyncio.Queue[ChoiceDelta | None] = asyncio.Queue()
        params = params or SamplingParams(**self.default_sampling)

        async def read() -> None:
            try:
                ids = self._encode(prompt)
                await self._llm.until_ready()
                items = self._llm.submit(
                    ids, params, request_id=new_request_id(), options=RequestOptions(adapter=lora)
                )
                async with aclosing(items) as stream:
                    async for item in stream:
                        if isinstance(item, ChoiceDelta):
                            queue.put_nowait(item)
            finally:
                queue.put_nowait(None)

        future = self._run(read())
        try:
            while (delta := self._run(queue.get()).result()) is not None:
                yield delta
            future.result()
        finally:
            future.cancel()

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder in PEFT's layout; `generate(..., lora=name)` then uses it.

        Raises RequestError if it cannot be served, the name is in use, or too many are loaded.
        """
        self._run(self._llm.load_adapter(name, path)).result()

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Raises RequestError if there is no adapter with this name."""
        self._run(self._llm.unload_adapter(name)).result()

    def render(self, chat: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a rendered conversation. Special tokens are recognized in messages of the
        assistant only. Raises RequestError if the template refuses the conversation, and logs a warning if it
        leaves out or moves a message."""
        template, tokenizer = require(self._llm.chat_template), self.tokenizer
        conversation = render_conversation(template, chat, tokenizer.special_spans)
        for name, warning in conversation.warnings.items():
            _log.warning("without effect: %s%s", name, warning)
        prompt = conversation.prompt
        return prompt if isinstance(prompt, list) else self._encode_text(prompt, add_special_tokens=False)

    def close(self) -> None:
        """Stop the workers and free all resources. Idempotent."""
        self._shut_down()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` in the loop's thread.

        Raises RuntimeError if the LLM is closed or the process forked.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("this LLM is closed, or was created before this process was forked")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text, or the given ids (any integer type).

        Raises TypeError for anything else.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise TypeError(f"a prompt must be a text or token ids, not {type(prompt).__name__}") from None

    def _encode_text(self, text: str | PromptText, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError if it is not valid Unicode."""
        try:
            prompt = PromptText(text) if isinstance(text, str) else text
            return self.tokenizer.encode_prompt(prompt, add_special_tokens)
        except UnicodeEncodeError:
            raise RequestError(
                "the prompt has a lone surrogate, which UTF-8 cannot encode", field="prompt"
            ) from None

    async def _generate(
        self, requests: list[tuple[Prompt, SamplingParams, int, str]], use_tqdm: bool
    ) -> list[RequestOutput]:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        limit = asyncio.Semaphore(self._llm.settings.server.max_requests)
        hidden = not use_tqdm or len(requests) < 2
        with Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
            bar = progress.add_task("prompts", total=len(requests))

            async def generate_one(
                prompt: Prompt, param: SamplingParams, priority: int, adapter: str
            ) -> RequestOutput:
                async with limit:
                    output = await self._collect(prompt, param, priority, adapter)
                progress.advance(bar)
                return output

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(generate_one(*request)) for request in requests]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the other errors are cancellations
        return [task.result() for task in tasks]

    async def _collect(
        self, prompt: Prompt, params: SamplingParams, priority: int, adapter: str
    ) -> RequestOutput:
        ids = self._encode(prompt)
        output = RequestOutput(
            request_id=new_request_id(),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(choice) for choice in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        await self._llm.until_ready()  # a crashed worker may be restarting
        items = self._llm.submit(
            ids, params, request_id=output.request_id, options=RequestOptions(priority, adapter=adapter)
        )
        async with aclosing(items) as items:
            async for item in items:
                self._add_item(output, item)
        output.finished = True
        return output

    def _add_item(self, output: RequestOutput, item: Item) -> None:
        if isinstance(item, Usage):
            output.num_cached_tokens, output.slo = item.cached_tokens, item.slo
        elif isinstance(item, PromptLogprobs):
            assert output.prompt_logprobs is not None
            for entry in item.entries:
                pairs = [(entry.token, entry.logprob), *((top.token, top.logprob) for top in entry.top)]
                output.prompt_logprobs.append(self._logprobs(pairs))
        elif isinstance(item, Pooled):
            output.pooled = item.vector
        else:
            choice = output.outputs[item.choice]
            choice.text += item.text
            choice.token_ids += item.tokens
            choice.finish_reason, choice.stop_reason = item.finish, item.stop
            for sampled in item.logprobs:
                choice.logprobs = choice.logprobs or []
                pairs = [(sampled.token, sampled.logprob), *((top.token, top.logprob) for top in sampled.top)]
                choice.logprobs.append(self._logprobs(pairs))

    def _logprobs(self, pairs: list[tuple[int, float]]) -> dict[int, Logprob]:
        return {token: Logprob(value, self.tokenizer.token_text(token)) for token, value in pairs}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. Token ids may be any Integral type, such as numpy's."""
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "__array__"):
        raise TypeError(
            f"prompts must be a string, token ids, or a list of strings or of token ids, not {prompts!r:.80}"
        )
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
