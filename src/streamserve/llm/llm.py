"""Library for scripts: `LLM("embedded").generate(["Hello"])`, with results in vLLM's format."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, Literal, NoReturn, TypeVar, cast

from streamserve.fleet.worker_process import may_use_gpu, prepared_fork_server
from streamserve.llm.async_llm import AsyncLLM, new_request_id
from streamserve.llm.chats import Conversation, Tools, encode, render_chat
from streamserve.llm.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from streamserve.llm.params import ScriptParams
from streamserve.llm.prompts import LoRARequest, Prompt, TokensPrompt, as_list, read_prompt
from streamserve.llm.requests import ScriptRequest, output_of
from streamserve.llm.scores import judging_prompts, scored, text_pairs
from streamserve.llm.script_tokenizer import ScriptTokenizer
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import ModelInfo
from streamserve.protocol.reports import Report
from streamserve.protocol.request_options import RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.options import Settings
from streamserve.settings.resolve import resolve
from streamserve.text.embedding import embedding, embedding_params, similarity
from streamserve.text.output import ChoiceDelta
from streamserve.text.tokenizer import Tokenizer

T = TypeVar("T")

CLOSE_SECONDS = 60.0
"""Upper bound of the seconds that a worker takes to stop or to be killed."""


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

    Takes the settings of `streamserve generate` as keyword arguments, also under the names of vLLM and other
    programs. Raises SettingsError for an invalid setting, CheckpointError for a model that cannot be served,
    StartError if the worker exits before it is ready.
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

    def get_tokenizer(self) -> ScriptTokenizer:
        """Return the tokenizer, with the names of transformers' tokenizers."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> ScriptParams:
        """Return SamplingParams with the values that the checkpoint recommends: see `default_sampling`."""
        return self._llm.get_default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Let later requests share no prefix with earlier ones; return True. The blocks of earlier requests
        are evicted when their memory is needed."""
        return self._llm.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora: str | Sequence[str] = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for prompts, in their order. A prompt is a text, a list of token ids, or a mapping
        with `prompt` or `prompt_token_ids`.

        With `use_tqdm`, standard error shows the progress of several prompts.

        `sampling_params`, `priority` (lower is served first; None: 0), `lora` (the name of a LoRA adapter, ""
        for none) and `lora_request` (an adapter that is loaded if it is not loaded yet) are one value for all
        prompts, or one per prompt. Without `sampling_params`, `default_sampling` applies; if they are given,
        the checkpoint's values are not used.

        Raises RequestError for the first prompt that is refused, or that repeatedly crashes its worker;
        StartError while no worker can be started.
        """
        prompt_list = as_list(prompts)
        count = len(prompt_list)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        requests = [
            ScriptRequest(new_request_id(), *each)
            for each in zip(
                prompt_list,
                _each(params, count, "sampling parameters"),
                _each(0 if priority is None else priority, count, "priorities"),
                _each(lora, count, "LoRA adapters"),
                _each(lora_request, count, "LoRA requests"),
                strict=True,
            )
        ]
        return self._results(self._generate(requests, use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora: str | Sequence[str] = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto"] = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one or several conversations, rendered with the chat template; see `generate` and
        `render`. Calls of `tools` are in the output's text as the model writes them.

        Without `sampling_params`, an output may fill the context.
        """
        if chat_template_content_format != "auto":
            raise RequestError(
                "chat_template_content_format must be auto: the template shows which form it reads",
                field="chat_template_content_format",
            )
        single = not messages or isinstance(messages[0], Mapping) or isinstance(messages, str)
        chats = cast(Sequence[Conversation], [messages] if single else messages)
        prompts = [
            self._rendered(
                chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for chat in chats
        ]
        if sampling_params is None:
            sampling_params = ScriptParams(**self.default_sampling, max_tokens=None)
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            lora=lora,
            lora_request=lora_request,
        )

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts, in their order. Each has its first `dimensions` numbers (None:
        all).

        Raises RequestError if the model does not embed (task), and as `generate` does.
        """
        config = self._llm.embedding
        if config is None:
            raise RequestError('this model does not embed: give task="embed"', field="model")
        outputs = self.generate(prompts, embedding_params(config), use_tqdm=use_tqdm)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(embedding(output.pooled, config, dimensions).tolist()),
                output.prompt_token_ids,
            )
            for output in outputs
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs of texts: one first text with each second text, or texts one by one.

        A reranking model (task="score") judges each pair; `instruction` says what makes a document relevant.
        With an embedding model, the score is the cosine similarity. Raises RequestError for other models.
        """
        pairs = text_pairs(data_1, data_2)
        if (scoring := self._llm.scoring) is not None:
            prompts = judging_prompts(self.tokenizer, scoring, pairs, instruction)
            outputs = self.generate(prompts, scoring.params, use_tqdm=use_tqdm)
            return [scored(output, scoring.score(output.pooled)) for output in outputs]
        config = self._llm.embedding
        if config is None:
            raise RequestError(
                'this model neither scores nor embeds: give task="score" or "embed"', field="model"
            )
        if instruction is not None:
            raise RequestError("instruction is for models that score: write it into the first text")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        ids: list[Prompt] = [encode(self.tokenizer, self.tokenizer.literal(text)) for text in texts]
        outputs = self.generate(ids, embedding_params(config), use_tqdm=use_tqdm)
        by_text = dict(zip(texts, outputs, strict=True))
        vectors = {text: embedding(output.pooled, config) for text, output in by_text.items()}
        return [scored(by_text[two], similarity(vectors[one], vectors[two])) for one, two in pairs]

    def beam_search(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse beam search by name."""
        raise NotImplementedError(
            "beam_search: a beam is not a sample, so it has no seed, and draft tokens cannot be verified "
            "against it: use generate with n, or with temperature 0"
        )

    def sleep(self, level: int = 1) -> NoReturn:
        """Refuse sleeping by name."""
        raise NotImplementedError(
            "sleep: workers cannot give up their memory and keep running: use close, and create the LLM again"
        )

    def classify(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse classification by name."""
        raise NotImplementedError(
            "classify: classification heads are not supported: use generate with structured_outputs "
            "(choice), score or embed"
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora: str = ""
    ) -> Generator[ChoiceDelta, None, None]:
        """Yield deltas of one prompt's output as they are generated. `lora` is the name of a LoRA adapter, ""
        for none. Without `sampling_params`, `default_sampling` applies.

        Leaving the loop early cancels the request.
        """
        queue: asyncio.Queue[ChoiceDelta | None] = asyncio.Queue()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params

        async def read() -> None:
            try:
                read = read_prompt(prompt)
                ids = encode(self.tokenizer, read.text or "") if read.ids is None else read.ids
                await self._llm.until_ready()
                options = RequestOptions(cache_salt=read.cache_salt, adapter=lora)
                items = self._llm.submit(ids, params, request_id=new_request_id(), options=options)
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

    def render(
        self,
        chat: Conversation,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a rendered conversation. Special tokens are recognized in messages of the
        assistant only.

        `tools` and `chat_template_kwargs` are inputs of the template; `chat_template` is the source of a
        template in place of the model's. `add_generation_prompt` opens the reply, and
        `continue_final_message` leaves the last message open instead. Raises RequestError if the template
        refuses the conversation, and logs a warning if it leaves out or moves a message.
        """
        rendered = self._rendered(
            chat,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return list(rendered["prompt_token_ids"])

    def _rendered(self, chat: Conversation, **options: Any) -> TokensPrompt:
        return render_chat(self.tokenizer, self._llm.chat_template, chat, **options)

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

    def _results(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to its end. On any error, including Ctrl-C, cancel all its requests."""
        future = self._run(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _generate(self, requests: list[ScriptRequest], use_tqdm: bool) -> list[RequestOutput]:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        limit = asyncio.Semaphore(self._llm.settings.server.max_requests)
        hidden = not use_tqdm or len(requests) < 2
        with Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
            bar = progress.add_task("prompts", total=len(requests))

            async def generate_one(request: ScriptRequest) -> RequestOutput:
                async with limit:
                    output = await output_of(self._llm, request)
                progress.advance(bar)
                return output

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(generate_one(request)) for request in requests]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the other errors are cancellations
        return [task.result() for task in tasks]


def _each(value: Any, count: int, what: str) -> list[Any]:
    """Return one value for each prompt; a text and every value that is no sequence are for all. Raises
    ValueError for another number of values."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{count} prompts, but {len(value)} {what}")
    return list(value)
