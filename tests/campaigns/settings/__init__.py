"""The family `settings`: with random settings and requests, texts and log-probabilities equal a plain
engine's, or the settings are refused by name."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from streamserve import embedded
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.adapters import adapter_paths
from streamserve.settings.options import Settings, SettingsError
from streamserve.settings.resolve import resolve
from tests.adapters import write_adapter
from tests.campaigns.ledger import REPOSITORY
from tests.campaigns.outcome import Outcome, TrialFailure
from tests.campaigns.process_output import captured
from tests.campaigns.settings.draw import draw_settings, generators
from tests.campaigns.settings.serve import (
    ANSWER_SECONDS,
    Refused,
    as_refusal,
    draw_requests,
    serve_requests,
    serving_model,
)
from tests.campaigns.settings.special import ADMIN_KEY, ALWAYS, API_KEY, Environment, consistent, special
from tests.campaigns.settings.trial_client import Answer, TrialClient, complete_answer
from tests.campaigns.settings.workload import (
    REQUESTS,
    TrialRequest,
    make_request,
    with_adapter,
    with_neutral_fields,
)
from tests.checkpoints import make_checkpoint

FOLDER = REPOSITORY / "build" / "campaigns"
PER_TRIAL = 60
Shape = Callable[[TrialRequest], TrialRequest]
PLAIN = {
    "draft": "none", "profile": False, "threads": 1, "num_blocks": 2000, "log_level": "error",
    "stuck_after": 120.0, "grammar_timeout": 60.0,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint that trials serve: its precision, the size of its vocabulary, and draft models for it."""

    path: str
    dtype: str
    vocabulary: int
    environment: Environment


@dataclass
class Trials:
    """The family's checkpoints, and the answers of a plain engine that have been computed so far."""

    models: dict[str, Model]
    answers: dict[tuple[str, ...], dict[int, Answer]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    requests: int = PER_TRIAL
    numbers: int = REQUESTS
    max_wait: float = ANSWER_SECONDS

    def trial(self, seed: int) -> Outcome:
        return self.run_settings(seed, *self.settings_of(seed))

    def settings_of(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw the checkpoint and the settings of a trial."""
        rng = Random(f"settings-{seed}")
        name = rng.choices(list(self.models), [1 if name == "embedded" else 2 for name in self.models])[0]
        return name, consistent(
            rng, draw_settings(rng, generators(special(self.models[name].environment)), ALWAYS)
        )

    def run_settings(
        self, seed: int, name: str, overrides: dict[str, Any], shape: Shape = lambda request: request
    ) -> Outcome:
        """Serve the requests of a trial with these settings. `shape` may change a request in ways that must
        not change its text."""
        reported = {"model": name} | {key: value for key, value in overrides.items() if key != "port"}
        with captured() as log:
            try:
                counts = asyncio.run(self._run_settings(Random(f"requests-{seed}"), name, overrides, shape))
                log.check()
            except Refused as refused:
                return Outcome(verdict="refused", detail=str(refused), settings=reported)
            except TrialFailure as failure:
                detail = f"{failure.detail}\n{_tail(log.text())}"
                return Outcome(verdict="failed", kind=failure.kind, detail=detail, settings=reported)
        return Outcome(verdict="passed", settings=reported, counts=counts)

    def figures(self) -> dict[str, Any]:
        return {}

    async def _run_settings(
        self, rng: Random, name: str, overrides: dict[str, Any], shape: Shape
    ) -> dict[str, int]:
        model = self.models[name]
        settings = resolve_settings(model, overrides)
        numbers = draw_requests(rng, self.requests, self.numbers)
        requests = [
            shape(with_neutral_fields(self._request(number, model, settings), rng)) for number in numbers
        ]
        expected = await self._expected(name, model, settings)
        native = settings.model.backend in ("auto", "native")
        # In float32 the reference's sums differ in the last bits. That is too little for another token or for
        # log-probabilities that are not close, but enough for another integer in a KV cache of 8 bits.
        invariant = native or (
            _dtype(settings, model) == "float32" and settings.model.kv_cache_dtype == "auto"
        )
        rejection = settings.model.speculation_mode == "rejection"
        counts, report = await serve_requests(
            settings,
            lambda llm, http: TrialClient(
                llm, http, expected, settings, rng, invariant, greedy_only=rejection, exact_logprobs=native
            ),
            requests,
            self.max_wait,
        )
        return counts | _guards(settings, report)

    def _request(self, number: int, model: Model, settings: Settings) -> TrialRequest:
        """Return a request by its number, with an adapter if the settings have any."""
        request = make_request(number, model.vocabulary)
        return with_adapter(request, list(adapter_paths(settings.server.lora)))

    async def _expected(self, name: str, model: Model, settings: Settings) -> dict[int, Answer]:
        """Return the answers of a plain engine with the same weights, kernels and KV, computed once."""
        numerics = {
            "dtype": _dtype(settings, model),
            "backend": settings.model.backend,
            "kernel_path": settings.model.kernel_path,
            "numerics": settings.model.numerics,
            "quantization": settings.model.quantization,
            "head_quantization": settings.model.head_quantization,
            "kv_cache_dtype": settings.model.kv_cache_dtype,
            "lora": settings.server.lora,
        }
        answers = self.answers.setdefault((name, *map(str, numerics.values())), {})
        if not answers:  # all requests at once, since starting the engine takes longer than answering them
            plain = resolve_settings(model, {**PLAIN, **numerics, "port": 0})
            async with serving_model(plain) as (llm, _):

                async def add_answer(number: int) -> None:
                    answers[number] = await complete_answer(
                        llm, replace(self._request(number, model, plain), edits=())
                    )

                await asyncio.gather(*map(add_answer, range(self.numbers)))
        return answers


def resolve_settings(model: Model, overrides: dict[str, Any]) -> Settings:
    """Return the settings of a trial. Raises Refused if they are refused by name."""
    try:
        return resolve(model.path, overrides, environ={})
    except (SettingsError, CheckpointError) as error:
        raise as_refusal(error) from error


def _dtype(settings: Settings, model: Model) -> str:
    return model.dtype if settings.model.dtype == "auto" else settings.model.dtype


def _guards(settings: Settings, report: Any) -> dict[str, int]:
    """Return counts of the events in workers during which results must stay equal."""
    if report is None:
        return {}
    speculation, transfer, remote = report.speculation, report.transfer, report.remote
    return {
        "pairs": int(bool(settings.server.pairs or settings.server.prefill)),
        "preemptions": report.preemptions,
        "accepted_draft_tokens": speculation.accepted if speculation else 0,
        "drafted_tokens": speculation.drafted if speculation else 0,
        "transferred_bytes": transfer.sent_bytes if transfer else 0,
        "swaps": report.evictions.swaps if report.evictions else 0,
        "stream_chunks": report.streams.chunks if report.streams else 0,
        "withdrawn_tokens": report.streams.withdrawn if report.streams else 0,
        "service_trees": remote.trees if remote else 0,
    }


def _tail(log: str) -> str:
    start = log.find("Traceback")
    return log[start:][-1200:] if start >= 0 else log[-800:]


def models(folder: Path) -> dict[str, Model]:
    """Return the checkpoints of the family, made in `folder` unless they are there."""
    checkpoints = {
        "llama": random_model(folder, "llama", "float32"),
        "qwen3": random_model(folder, "qwen3", "bfloat16", head_dim=16),
    }
    config = msgspec.json.decode((embedded.path("embedded") / "config.json").read_bytes())
    environment = Environment(
        folder, ("embedded-draft",), config["num_hidden_layers"], config["max_position_embeddings"]
    )
    return checkpoints | {"embedded": Model("embedded", "bfloat16", config["vocab_size"], environment)}


def random_model(folder: Path, architecture: str, dtype: str, **fields: Any) -> Model:
    """Return a random checkpoint with two drafts: itself, which is always right, and another one that is
    mostly wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "keys").write_text(f"# keys of the trials\n{API_KEY}\n{ADMIN_KEY}\n")
    paths = [folder / architecture, folder / f"{architecture}-draft"]
    for seed, path in enumerate(paths):
        if not (path / "tokenizer_config.json").exists():
            make_checkpoint(path, architecture, dtype, seed=seed, **fields)
    adapter = folder / f"{architecture}-adapter"
    if not (adapter / "adapter_model.safetensors").exists():
        write_adapter(adapter, paths[0])
    environment = Environment(
        folder, (str(paths[0]), str(paths[1])), layers=2, positions=512, adapters=(f"adapter={adapter}",)
    )
    return Model(str(paths[0]), dtype, 320, environment)


@contextmanager
def open_campaign() -> Iterator[Trials]:
    """Set the family up."""
    yield Trials(models(FOLDER))
