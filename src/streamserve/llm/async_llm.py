"""AsyncLLM: a served model inside an event loop. `LLM` and the HTTP server are built on it.


prompt → AsyncLLM.submit → Fleet → worker process … events → text → Delta
"""

import os
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from pathlib import Path

import msgspec

from streamserve.baselines.routers import parse_router
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open
from streamserve.fleet.report_totals import total
from streamserve.fleet.runtime import FleetRuntime
from streamserve.fleet.scaling import AddedRole, Removal
from streamserve.fleet.tracing.recorder import Recorder, Sink
from streamserve.fleet.tracing.telemetry import Telemetry, exporting
from streamserve.fleet.tracing.timeline import Timeline
from streamserve.fleet.view import RouterView, router_view
from streamserve.fleet.worker_state import Topology, role
from streamserve.llm.adapters import ServedAdapters
from streamserve.llm.items import Item, read_items
from streamserve.llm.kv_network import kv_network
from streamserve.llm.launchers import make_launcher
from streamserve.llm.outputs import RequestOutput
from streamserve.llm.params import RequestOutputKind, ScriptParams, request_params
from streamserve.llm.prompt_stream import LocalPromptStream
from streamserve.llm.prompts import LoRARequest, Prompt
from streamserve.llm.requests import ScriptRequest, outputs_of
from streamserve.llm.script_tokenizer import ScriptTokenizer
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.config import ModelConfig, WorkerConfig
from streamserve.protocol.draft_kind import DraftKind, draft_kind
from streamserve.protocol.errors import RequestError, context_overflow
from streamserve.protocol.field_errors import InvalidField, mismatch_of
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.kept import digest_of
from streamserve.protocol.messages import ModelInfo, Ready
from streamserve.protocol.reports import IncidentReport, Report
from streamserve.protocol.request_options import NO_OPTIONS, RequestOptions
from streamserve.protocol.sampling import SamplingParams, check_sampling, check_types
from streamserve.settings.adapters import adapter_paths
from streamserve.settings.checkpoints import root_name
from streamserve.settings.embedding import read_embedding
from streamserve.settings.options import Settings, SettingsError
from streamserve.settings.resolve import check_router, topology, worker_bound
from streamserve.settings.sampling import recommended_sampling
from streamserve.settings.server_config import ServerConfig
from streamserve.settings.templates import read_chat_template
from streamserve.system.crashes import crash_folder
from streamserve.system.processors import usable_processors
from streamserve.text.grammar import GrammarCheck, compiler
from streamserve.text.latency import Stopwatch
from streamserve.text.message import NewReader
from streamserve.text.reranker import scoring
from streamserve.text.tokenizer import Tokenizer

STEP_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_chunk")
"""Limits that can be set separately for prefill and decode workers: prefill_max_chunk and so on."""


@dataclass(frozen=True)
class EngineHealth:
    """Whether requests are being served.

    If not, `detail` is the reason, and `retry_after` is the expected number of seconds until they are. If
    they are, `missing` names the workers that should serve but do not, and why.
    """

    ready: bool
    detail: str
    retry_after: float | None = None
    missing: str = ""


class AsyncLLM:
    """A model served by worker processes, for use in one event loop. Start with `start`, end with `close`."""

    def __init__(self, settings: Settings) -> None:
        """Load the tokenizer and the chat template. `start` starts the workers.

        Raises CheckpointError if the folder's tokenizer, chat template or recommended sampling values cannot
        be read, SettingsError if the given chat template cannot be read, or the timeline file cannot be
        written.
        """
        self.settings = settings
        template = read_chat_template(settings.server.chat_template)
        self.tokenizer = Tokenizer.from_folder(settings.model.path, template)
        self.chat_template = self.tokenizer.renderer()
        self.served_names = settings.server.served_model_name or (settings.name,)
        task, path = settings.model.task, Path(settings.model.path)
        self.task = task
        self.default_sampling = recommended_sampling(path)
        self.embedding = read_embedding(path) if task == "embed" else None
        self.scoring = scoring(self.tokenizer) if task == "score" else None
        self.root = root_name(settings.name, settings.model.path)
        self.created = int(time.time())
        self._grammars: GrammarCheck | None = None
        given = adapter_paths(settings.server.lora)
        self._adapters = ServedAdapters(given, self.served_names, settings.model, lambda: self._runtime)
        self._kv_network = kv_network(settings.server)
        self._max_choices = max_choices(settings)
        self._cache_generation = 0
        self._runtime = self._new_runtime()

    def _new_runtime(self) -> FleetRuntime:
        """Return a new fleet with these settings, not started."""
        settings, server = self.settings, self.settings.server
        fleet = fleet_config(settings, tuple(self._adapters.by_name.values()))
        return FleetRuntime(
            fleet, self._worker_config, recorder(server), make_launcher(server, settings.model)
        )

    async def start(self, wait: bool = True) -> None:
        """Start the workers; with `wait`, also wait until they are ready."""
        await self._runtime.start()
        if wait:
            try:
                await self.until_ready()
            except BaseException:
                await self._runtime.close()
                raise

    async def until_ready(self) -> None:
        """Wait until the workers are ready.

        Raises CheckpointError or StartError with the reason if they cannot start.
        """
        await self._runtime.until_ready()
        await self._adapters.until_loaded()

    async def until_failed(self) -> None:
        """Wait for an unrecoverable failure of the server itself. Raises FleetError."""
        await self._runtime.until_failed()

    async def close(self) -> None:
        """Stop the workers and free all resources; open requests end with an error."""
        if self._grammars is not None:
            self._grammars.close()
        await self._runtime.close()

    async def unload(self) -> None:
        """Stop the workers, which frees their memory. `start` starts new ones. Open requests end with an
        error."""
        runtime, self._runtime = self._runtime, self._new_runtime()
        await runtime.close()

    @property
    def ready(self) -> Ready:
        """The startup report of the worker that became ready last. It may be restarting now; requests wait
        for it. Raises RequestError (503) if no worker has been ready."""
        ready = self._runtime.fleet.supervisor.served
        if ready is None:
            health = self.health()
            raise RequestError(health.detail, status=503, retry_after=health.retry_after)
        return ready

    @property
    def model(self) -> ModelInfo:
        """The served model. Raises RequestError (503) while it is not loaded."""
        return self.ready.model

    def health(self) -> EngineHealth:
        """Return whether requests are being served now."""
        fleet = self._runtime.fleet
        ready, detail = fleet.health()
        waiting = self._runtime.waiting()
        if waiting and not ready:
            detail = f"waiting for machines to join, for worker {', '.join(waiting)}: {detail}"
        if ready:
            return EngineHealth(ready, detail, missing=fleet.availability.missing())
        return EngineHealth(ready, detail, fleet.availability.retry_after(time.monotonic()))

    def incidents(self) -> IncidentReport:
        """Return the incidents so far: worker crashes, and the requests suspected of causing them."""
        return self._runtime.incidents()

    def report(self) -> Report | None:
        """Return the total of the workers' latest reports, of the counters of ended workers, and of the
        tokens that the fleet made void. None if no worker has reported."""
        fleet = self._runtime.fleet
        reports = [fleet.supervisor.ended, *(worker.report for worker in fleet.workers.values())]
        report = total(report for report in reports if report)
        if report is None or report.streams is None:
            return report
        withdrawn = report.streams.withdrawn + fleet.withdrawn
        streams = msgspec.structs.replace(report.streams, withdrawn=withdrawn)
        return msgspec.structs.replace(report, streams=streams)

    def routing(self) -> RouterView:
        """Return the present state of the workers, and recent routing decisions with their reasons."""
        machines, now = self._runtime.machines(), time.monotonic()
        return router_view(self._runtime.fleet, self.settings.server.router, machines, now)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that requests may use, by name."""
        return self._adapters.by_name

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder in PEFT's layout, and serve it as `name`.

        Raises RequestError if it cannot be served, the name is in use, or too many are loaded.
        """
        await self._adapters.load(name, path)

    async def ensure_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter as `load_adapter` does, unless it is loaded."""
        await self._adapters.ensure(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Stop serving a LoRA adapter; its open requests run to completion.

        Raises RequestError (404) if there is no adapter with this name.
        """
        await self._adapters.unload(name)

    async def drain(self, worker: str, draining: bool) -> int:
        """Drain a worker (send it no new requests), or resume it.

        Returns the number of open requests at the worker or at its partner in a stream pair. Raises
        RequestError (404) if there is no such worker.
        """
        return await self._runtime.drain(worker, draining)

    async def add_workers(self, role: AddedRole, count: int = 1) -> tuple[str, ...]:
        """Start `count` workers of a role, or pairs; return their names. They get requests once they are
        ready. Raises RequestError if they cannot be added: `max_workers` limits their number."""
        scaling = self._runtime.fleet.scaling
        names = scaling.free_names(role, count)
        self._check_router(scaling.after_adding(names))
        await self._runtime.add_workers(names)
        return names

    async def remove_workers(self, name: str, within: float = inf) -> Removal:
        """Remove a worker (pair-N: a pair) once it has no requests. Requests that it still has after `within`
        seconds continue at other workers. May be repeated while the worker is leaving.

        Raises RequestError (404) if there is no such worker, (409) if the other workers could not serve.
        """
        scaling = self._runtime.fleet.scaling
        names = scaling.named(name)
        self._check_router(scaling.after_removing(names))
        return Removal(names, await self._runtime.remove_workers(names, within))

    def _check_router(self, workers: Topology) -> None:
        try:
            check_router(self.settings.server.router, workers)
        except SettingsError as error:
            raise RequestError(str(error), status=409) from error

    def process_id(self, worker: str = "unified-0") -> int:
        """Return the process id of a worker."""
        return self._runtime.process_id(worker)

    async def check_grammar(self, grammar: Grammar, field: str) -> None:
        """Compile a grammar, unless it is already compiled.

        Raises RequestError about `field` if the grammar cannot be used.
        """
        if self._grammars is None:
            model, server = self.model, self.settings.server
            compile = compiler(self.tokenizer, model.vocab_size, model.eos_token_ids)
            self._grammars = GrammarCheck(compile, server.max_grammar_bytes, server.grammar_timeout)
        await self._grammars(grammar, field)

    def get_tokenizer(self) -> ScriptTokenizer:
        """Return the tokenizer, with the names of transformers' tokenizers."""
        return ScriptTokenizer(self.tokenizer, self.chat_template)

    def get_default_sampling_params(self) -> ScriptParams:
        """Return sampling parameters with the values that the checkpoint recommends."""
        return ScriptParams(**self.default_sampling)

    def reset_prefix_cache(self) -> bool:
        """Let later requests share no prefix with earlier ones; return True. The blocks of earlier requests
        are evicted when their memory is needed."""
        self._cache_generation += 1
        return True

    def _salted(self, cache_salt: str) -> str:
        """Return the salt of a request, which differs after each `reset_prefix_cache`."""
        return f"{cache_salt}\0{self._cache_generation}" if self._cache_generation else cache_salt

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt while it is generated; the last is `finished`. The `output_kind` of
        `sampling_params` says whether each has all output so far, only the new output, or whether only the
        last is yielded. Without `sampling_params`, the checkpoint's values apply.

        Closing the iterator cancels the request. Raises RequestError if the request is refused or lost.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        kind = params.output_kind if isinstance(params, ScriptParams) else RequestOutputKind.CUMULATIVE
        request = ScriptRequest(
            request_id or new_request_id(), prompt, params, priority, lora_request=lora_request
        )
        async with aclosing(outputs_of(self, request, kind)) as outputs:
            async for output in outputs:
                yield output

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
        reader: NewReader | None = None,
    ) -> AsyncGenerator[Item, None]:
        """Yield the items of a request as they are generated; the last is a Usage. With `reader`, each choice
        is parsed as a chat reply.

        Closing the iterator cancels the request. Raises RequestError before the first item if the request is
        refused, or later if it is lost.
        """
        stopwatch = Stopwatch(time.monotonic())
        params = self.complete(prompt, params)
        priority, cache_salt = options.priority, options.cache_salt
        if type(priority) is not int or not -(2**63) <= priority < 2**63 or not isinstance(cache_salt, str):
            raise RequestError(
                "priority must be an integer of 64 bits, and cache_salt a string", field="priority"
            )
        if params.grammar is not None:
            await self.check_grammar(params.grammar, "grammar")
        if params.pooling and params.pooling.kind == "mean":
            cache_salt = f"{cache_salt}\0{request_id}"  # a cached prefix would have no hidden states
        cache_salt = self._salted(cache_salt)
        fingerprint = self._adapters.named(options.adapter)
        keep = b""
        if self.settings.server.launcher == "join":
            keep = digest_of(options.idempotency_key, prompt, params, cache_salt, fingerprint)
        opened = Open(request_id, prompt, params, priority, cache_salt, adapter=fingerprint, keep=keep)
        async with aclosing(self._runtime.submit(opened)) as steps:
            items = read_items(
                steps, self._runtime, self.tokenizer, request_id, prompt, params, stopwatch, reader
            )
            async for item in items:
                yield item

    async def open(
        self,
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
        answer_early: bool = False,
        expected_tokens: int = 0,
    ) -> LocalPromptStream:
        """Open a prompt stream, empty at first. It is routed as a prompt of at least `expected_tokens`.

        Unless `answer_early` is set, only `params.n` has an effect before the prompt is finished. Raises
        RequestError if no more requests are accepted, or if the parameters do not allow early answers.
        """
        self._check_served(params)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        max_tokens = params.max_tokens if answer_early else None
        params = msgspec.structs.replace(
            params, seed=seed, max_tokens=self.model.max_model_len if max_tokens is None else max_tokens
        )
        if answer_early and params.stop:
            raise RequestError(
                "an early answer cannot end at a stop string: leave out stop or answer_early",
                field="stop",
            )
        opened = Open(
            request_id,
            [],
            params,
            options.priority,
            self._salted(options.cache_salt),
            open=True,
            answer_early=answer_early,
            adapter=self._adapters.named(options.adapter),
            expected_tokens=expected_tokens,
        )
        prompt = LocalPromptStream(self._runtime, self.tokenizer, opened)
        await prompt.start()
        return prompt

    def complete(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """Return `params` with a seed, and with a `max_tokens` that fits in the context.

        Raises RequestError if the prompt or the parameters cannot be served.
        """
        model = self.model
        self._check_served(params)
        if isinstance(params, ScriptParams) and (params.truncate_prompt_tokens or not params.detokenize):
            raise RequestError(
                "truncate_prompt_tokens and detokenize act in generate: leave them out",
                field="sampling_params",
            )
        try:
            params = check_types(request_params(params))
            check_sampling(params, model.vocab_size, model.eos_token_ids)
        except InvalidField as error:
            raise RequestError(str(error), field=error.field) from error
        except msgspec.ValidationError as error:
            raise RequestError(str(error), field=mismatch_of(error).field) from error
        if not prompt:
            raise RequestError("the prompt is empty", field="prompt")
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= model.vocab_size:
            message = f"the prompt must consist of token ids: integers from 0 to {model.vocab_size - 1}"
            raise RequestError(message, field="prompt")
        limit, maximum = model.max_model_len - len(prompt), model.max_model_len - (params.max_tokens != 0)
        if len(prompt) > maximum:
            raise context_overflow(len(prompt), maximum, model.max_model_len, "prompt")
        if params.max_tokens is not None and params.max_tokens > limit:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but after a prompt of {len(prompt)} tokens only "
                f"{limit} tokens are left of the model's context of {model.max_model_len}: lower it or "
                "shorten the prompt",
                field="max_tokens",
            )
        return msgspec.structs.replace(
            params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_tokens=limit if params.max_tokens is None else params.max_tokens,
        )

    def _check_served(self, params: SamplingParams) -> None:
        """Raise RequestError if the model's task does not match the request, or if the request has too many
        choices."""
        if (params.pooling is None) != (self.task == "generate"):
            does = "generates text" if self.task == "generate" else "generates no text"
            raise RequestError(f"the model {does}: its task is {self.task} (--task)", field="model")
        if params.n > self._max_choices:
            raise RequestError(
                f"n is {params.n}, but at most {self._max_choices} sequences run at once", field="n"
            )

    def _worker_config(self, worker: str, incarnation: int, endpoint: str) -> WorkerConfig:
        return WorkerConfig(
            worker=f"{worker}/{incarnation}",
            role=role(worker),
            endpoint=endpoint,
            model=worker_model(self.settings, worker),
            host_workers=worker_bound(self.settings.server),
            host_number=list(self._runtime.fleet.workers).index(worker),
            reports_prefixes=worker_bound(self.settings.server) > 1,
            kv_transport=self.settings.server.kv_transport,
            kv_network=self._kv_network,
            kv_bytes_per_second=self.settings.server.kv_bytes_per_second,
            crash_folder=str(crash_folder(os.environ)),
            trace=bool(self.settings.server.timeline or self.settings.server.otlp_traces_endpoint),
            log_level=self.settings.server.log_level,
            log_format=self.settings.server.log_format,
        )


def fleet_config(settings: Settings, adapters: tuple[Adapter, ...] = ()) -> FleetConfig:
    """Return the fleet's configuration from the settings. `adapters` are LoRA adapters that are loaded from
    the start."""
    server = settings.server
    return FleetConfig(
        topology=topology(server),
        router=parse_router(server.router),
        max_requests=server.max_requests,
        max_waiting_tokens=server.max_waiting_tokens,
        stuck_after=server.stuck_after,
        continue_tokens=server.continue_tokens if settings.model.enable_prefix_caching else 0,
        adapters=adapters,
        slo_admission=settings.model.slo_admission,
        max_workers=server.max_workers,
    )


def worker_model(settings: Settings, worker: str) -> ModelConfig:
    """Return one worker's model settings: its share of the CPU cores, and its role's limits of a step.

    Prefill workers do not draft. A separate draft model still runs on them, because its KV is transferred,
    too.
    """
    model, own_role = settings.model, role(worker)
    # Agents of other machines determine the threads of their workers.
    local = settings.server.launcher == "local"
    threads = threads_of_worker(model, worker_bound(settings.server)) if local else model.threads
    drafts = own_role != "prefill" or draft_kind(model.draft) is DraftKind.MODEL
    draft = model.draft if drafts else "none"
    limits = {name: getattr(settings.server, f"{own_role}_{name}", None) for name in STEP_LIMITS}
    overrides = {name: limit for name, limit in limits.items() if limit is not None}
    return msgspec.structs.replace(model, threads=threads, draft=draft, **overrides)


def max_choices(settings: Settings) -> int:
    """Return the maximum number of choices of a prompt that run at once, on workers of any role."""
    one_of_each = {role(worker): worker for worker in topology(settings.server).names}
    return min(worker_model(settings, worker).max_num_seqs for worker in one_of_each.values())


def threads_of_worker(model: ModelConfig, workers: int) -> int:
    """Return the threads of each of `workers` workers: by default, its share of the processors."""
    return model.threads or max(1, usable_processors().threads // workers)


def recorder(server: ServerConfig) -> Recorder | None:
    """Return the recorder of request traces and timelines, or None if neither is configured. Raises
    SettingsError if the timeline cannot be written."""
    sinks: list[Sink] = []
    if server.timeline:
        try:
            sinks.append(Timeline(server.timeline))
        except OSError as error:
            message = f"timeline: {server.timeline} cannot be written: {error.strerror}"
            raise SettingsError(message) from error
    if server.otlp_traces_endpoint:
        sinks.append(Telemetry(exporting(server.otlp_traces_endpoint)))
    return Recorder(sinks) if sinks else None


def new_request_id() -> str:
    """Return a new random request id."""
    return f"req-{secrets.token_hex(12)}"
