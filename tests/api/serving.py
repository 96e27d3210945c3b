"""A real server on a free port, in a separate thread, and a scripted generator for failures."""

import asyncio
import os
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import httpx
import openai
from starlette.applications import Starlette

from streamserve.api.app import create_app
from streamserve.api.generator import Generator, Item
from streamserve.api.http.connection import Timeouts
from streamserve.api.http.connection_limits import ConnectionLimits
from streamserve.api.http.server import bind, serve
from streamserve.api.settings import ApiSettings
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.fleet.scaling import AddedRole, Removal
from streamserve.fleet.view import RouterView
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import Grammar
from streamserve.protocol.messages import ModelInfo
from streamserve.protocol.reports import IncidentReport, Report
from streamserve.protocol.request_options import NO_OPTIONS, RequestOptions
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.chat import Renderer
from streamserve.text.message import NewReader
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.reply_reader import ReplyReader
from streamserve.text.reranker import RerankScoring
from streamserve.text.stops import StopFinder
from streamserve.text.tokenizer import Tokenizer

ON_PAIRS = "STREAMSERVE_PAIRS" in os.environ
"""Whether servers use stream pairs by default. `make verify` runs these tests with and without pairs."""


@dataclass(frozen=True)
class Served:
    """A running server: its address, its generator, and clients for it."""

    url: str
    llm: Any
    http: httpx.Client
    client: openai.OpenAI

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric, or 0 if the metric has no sample yet."""
        expected = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((f"streamserve:{name}{{", f"streamserve:{name} ")) and all(
                part in line for part in expected
            ):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def active_sequences(self) -> int:
        """Return how many sequences the engine has, running or waiting, according to its latest report."""
        report = self.llm.report()
        return 0 if report is None else report.running + report.waiting


def until(health_state: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until `health_state` is true."""
    start = time.monotonic()
    while not health_state():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)


@dataclass(frozen=True)
class TLS:
    """Certificates for both sides of HTTPS."""

    server: ssl.SSLContext
    client: ssl.SSLContext


Start = Callable[[], Awaitable[Generator]]


@contextmanager
def served(
    start: Start,
    settings: ApiSettings | None = None,
    timeouts: Timeouts | None = None,
    limits: ConnectionLimits | None = None,
    tls: TLS | None = None,
    make_app: Callable[[Generator, ApiSettings | None], Starlette] = create_app,
) -> Iterator[Served]:
    """Serve a generator until the block ends. `start` runs in the server's event loop and returns the
    generator; `make_app` returns the application of a generator."""
    sock = bind("127.0.0.1", 0)
    url = f"{'https' if tls else 'http'}://127.0.0.1:{sock.getsockname()[1]}"
    ready: Future[Generator] = Future()
    ended: Future[Callable[[], None]] = Future()

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        ended.set_result(lambda: loop.call_soon_threadsafe(stop.set))
        llm = await start()
        app = make_app(llm, settings)
        server_side = tls.server if tls else None
        serving = asyncio.create_task(
            serve(app, sock, timeouts=timeouts, grace_seconds=1, limits=limits, tls=server_side)
        )
        ready.set_result(llm)
        await stop.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if hasattr(llm, "close"):
            await llm.close()

    # Without TLS no certificates are read: reading them takes longer than most tests.
    trusted = tls.client if tls else False
    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        llm = ready.result(timeout=60)
        with (
            httpx.Client(base_url=url, timeout=60, verify=trusted) as http,
            httpx.Client(verify=trusted) as openai_http,
            openai.OpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=openai_http
            ) as client,
        ):
            yield Served(url, llm, http, client)
    finally:
        ended.result(timeout=60)()
        thread.join(timeout=60)


@dataclass(frozen=True)
class ScriptedHealth:
    ready: bool = True
    detail: str = ""
    retry_after: float | None = None
    missing: str = ""


@dataclass(frozen=True)
class Submitted:
    """A request to the generator."""

    prompt: list[int]
    params: SamplingParams
    request_id: str
    options: RequestOptions


Script = Callable[[list[int], SamplingParams], AsyncGenerator[Item, None]]


async def hello_script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
    """The script of a generator that answers normally."""
    for choice in range(params.n):
        yield ChoiceDelta(choice, "hello", (72,))
        yield ChoiceDelta(choice, tokens=(3,), finish="stop")
    yield Usage(len(prompt), 2 * params.n)


async def parsed(
    items: AsyncGenerator[Item, None], params: SamplingParams, new_reader: NewReader
) -> AsyncGenerator[Item, None]:
    """Yield a script's items with the events of each choice. A stop string in the answer ends the choice."""
    readers: dict[int, ReplyReader] = {}
    ended: set[int] = set()
    async with aclosing(items):
        async for item in items:
            if not isinstance(item, ChoiceDelta):
                yield item
            elif item.choice not in ended:
                stops = StopFinder(params.stop, params.include_stop_str_in_output)
                reader = readers.setdefault(item.choice, ReplyReader(new_reader(), stops))
                delta = parsed_delta(reader, item)
                if delta.finish:
                    ended.add(item.choice)
                yield delta


def parsed_delta(reader: ReplyReader, delta: ChoiceDelta) -> ChoiceDelta:
    """Return a script's delta with its events, as ChoiceText makes it."""
    scan = reader.feed(delta.text)
    if delta.finish and (delta.finish != "stop" or isinstance(delta.stop, int)):
        reader.cut()
    if delta.finish and scan.stop is None:
        scan = scan + reader.finish()
    if scan.stop is not None:
        delta = replace(delta, finish="stop", stop=scan.stop)
    return replace(delta, events=scan.events, called=delta.finish is not None and reader.called)


@dataclass
class ScriptedPrompt:
    """A prompt stream of a scripted generator, which computes the whole prompt when it is finished."""

    script: Script
    ids: list[int] = field(default_factory=list)
    created: float = field(default_factory=time.perf_counter)

    @property
    def computed(self) -> int:
        return len(self.ids)

    async def edit(self, ids: list[int], tail: int) -> None:
        self.ids = ids

    def answer(
        self, ids: list[int], params: SamplingParams, reader: NewReader | None = None
    ) -> AsyncGenerator[Item, None]:
        items = self.script(ids, params)
        return items if reader is None else parsed(items, params, reader)

    async def finish(self) -> None:
        """Finish the prompt; a scripted generator gives no early answers."""

    async def close(self) -> None:
        """Do nothing: no request can be cancelled."""


@dataclass(frozen=True)
class ScriptedGenerator:
    """A generator that runs `script` for every request, to simulate failures."""

    tokenizer: Tokenizer
    script: Script = hello_script
    health_state: ScriptedHealth = field(default_factory=ScriptedHealth)
    latest_report: Report | None = None
    incident_report: IncidentReport = field(default_factory=IncidentReport)
    router_view: RouterView = field(default_factory=lambda: RouterView("flowguard", [], 0, []))
    submitted: list[Submitted] = field(default_factory=list)
    removals: list[tuple[str, float]] = field(default_factory=list)
    drained: list[tuple[str, bool]] = field(default_factory=list)
    served_names: tuple[str, ...] = ("scripted", "owner/scripted")
    root: str = "owner/scripted"
    task: str = "generate"
    embedding: EmbeddingConfig | None = None
    scoring: RerankScoring | None = None
    created: int = 1_700_000_000
    adapters: dict[str, Adapter] = field(default_factory=dict)
    model: ModelInfo = field(
        default_factory=lambda: ModelInfo(
            architecture="LlamaForCausalLM",
            parameters=1,
            vocab_size=320,
            max_model_len=64,
            eos_token_ids=(3,),
            weight_bytes=4,
            dtype="float32",
            backend="scripted",
            row_invariant=True,
            fingerprint="0123456789abcdef",
        )
    )

    @property
    def chat_template(self) -> Renderer | None:
        return self.tokenizer.renderer()

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
        reader: NewReader | None = None,
    ) -> AsyncGenerator[Item, None]:
        self.submitted.append(Submitted(prompt, params, request_id, options))
        items = self.script(prompt, params)
        return items if reader is None else parsed(items, params, reader)

    async def open(
        self,
        params: SamplingParams,
        *,
        request_id: str,
        options: RequestOptions = NO_OPTIONS,
        answer_early: bool = False,
        expected_tokens: int = 0,
    ) -> "ScriptedPrompt":
        return ScriptedPrompt(self.script)

    def complete(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        return params

    async def check_grammar(self, grammar: Grammar, field: str) -> None:
        """Accept any grammar. Grammars are not applied."""

    def health(self) -> ScriptedHealth:
        return self.health_state

    def incidents(self) -> IncidentReport:
        return self.incident_report

    def routing(self) -> RouterView:
        return self.router_view

    async def drain(self, worker: str, draining: bool) -> int:
        if worker != "unified-0":
            raise RequestError(f"there is no worker {worker!r}", status=404)
        self.drained.append((worker, draining))
        return len(self.submitted)

    async def add_workers(self, role: AddedRole, count: int = 1) -> tuple[str, ...]:
        if role == "pair":
            raise RequestError("without stream pairs", field="role")
        return tuple(f"{role}-{number + 1}" for number in range(count))

    async def remove_workers(self, name: str, within: float = inf) -> Removal:
        if name != "unified-1":
            raise RequestError(f"there is no worker {name!r}", status=404)
        self.removals.append((name, within))
        return Removal((name,), 3)

    async def load_adapter(self, name: str, path: str) -> None:
        self.adapters[name] = Adapter(name, path, name)

    async def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise RequestError(f"The LoRA adapter '{name}' does not exist", field="model", status=404)
        del self.adapters[name]

    def report(self) -> Report | None:
        return self.latest_report

    def replaced(self, **changes: Any) -> "ScriptedGenerator":
        return replace(self, **changes)


@contextmanager
def scripted(
    generator: ScriptedGenerator,
    settings: ApiSettings | None = None,
    timeouts: Timeouts | None = None,
    limits: ConnectionLimits | None = None,
    tls: TLS | None = None,
) -> Iterator[Served]:
    async def start() -> Generator:
        return generator

    with served(start, settings, timeouts, limits, tls) as server:
        yield server
