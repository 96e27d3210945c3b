"""Requests of scripts: from a prompt in any form to outputs in vLLM's format."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from streamserve.llm.chats import encode
from streamserve.llm.items import Item
from streamserve.llm.outputs import Collector, CompletionOutput, RequestOutput
from streamserve.llm.params import RequestOutputKind, ScriptParams, request_params
from streamserve.llm.prompts import LoRARequest, Prompt, read_prompt
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.messages import ModelInfo
from streamserve.protocol.request_options import NO_OPTIONS, RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta
from streamserve.text.tokenizer import Tokenizer


class RequestRunner(Protocol):
    """What runs the requests: `AsyncLLM`."""

    tokenizer: Tokenizer

    @property
    def model(self) -> ModelInfo: ...

    @property
    def adapters(self) -> Mapping[str, Adapter]: ...

    async def until_ready(self) -> None: ...

    async def ensure_adapter(self, name: str, path: str) -> None: ...

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
    ) -> AsyncGenerator[Item, None]: ...


@dataclass(frozen=True)
class ScriptRequest:
    """A request of a script. `lora` is the name of a loaded adapter; `lora_request` is loaded if it is not
    loaded yet, and takes precedence. Raises TypeError for parameters of another type."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    lora: str = ""
    lora_request: LoRARequest | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"sampling parameters must be SamplingParams, not {type(self.params).__name__}")


async def outputs_of(
    engine: RequestRunner, request: ScriptRequest, kind: RequestOutputKind
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of a request: `kind` says which. The last output is `finished`.

    Raises RequestError if the request is refused or lost, TypeError for a prompt of another type.
    """
    read = read_prompt(request.prompt)
    ids = encode(engine.tokenizer, read.text or "") if read.ids is None else read.ids
    await engine.until_ready()  # a crashed worker may be restarting
    ids = truncated(ids, request.params, engine.model.max_model_len)
    adapter = request.lora
    if request.lora_request is not None:
        adapter = request.lora_request.lora_name
        await engine.ensure_adapter(adapter, request.lora_request.lora_path)
    detokenize = not isinstance(request.params, ScriptParams) or request.params.detokenize
    collector = Collector(_empty_output(request, read.text, ids), engine.tokenizer, detokenize)
    options = RequestOptions(request.priority, read.cache_salt, adapter)
    items = engine.submit(ids, request_params(request.params), request_id=request.request_id, options=options)
    async with aclosing(items) as items:
        async for item in items:
            collector.add(item)
            partial = isinstance(item, ChoiceDelta) and not collector.complete
            if partial and kind is not RequestOutputKind.FINAL_ONLY:
                yield collector.take() if kind is RequestOutputKind.DELTA else collector.snapshot()
    collector.finish()
    yield collector.take() if kind is RequestOutputKind.DELTA else collector.output


async def output_of(engine: RequestRunner, request: ScriptRequest) -> RequestOutput:
    """Return the whole output of a request."""
    async with aclosing(outputs_of(engine, request, RequestOutputKind.FINAL_ONLY)) as outputs:
        async for output in outputs:
            return output
    raise AssertionError("every request has a last output")


def truncated(ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the last tokens of a prompt, if the parameters truncate it."""
    limit = params.truncate_prompt_tokens if isinstance(params, ScriptParams) else None
    if limit is None:
        return ids
    if limit == -1:
        limit = max(1, max_model_len - (1 if params.max_tokens is None else params.max_tokens))
    return ids[-limit:]


def _empty_output(request: ScriptRequest, text: str | None, ids: list[int]) -> RequestOutput:
    params, lora = request.params, request.lora_request
    return RequestOutput(
        request_id=request.request_id,
        prompt=text,
        prompt_token_ids=ids,
        outputs=[CompletionOutput(choice, lora_request=lora) for choice in range(params.n)],
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
        lora_request=lora,
    )
