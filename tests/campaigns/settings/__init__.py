"""The family `settings`: whatever settings are declared, whatever is asked for, the text is that of a plain
engine, or the settings are refused by name."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from streamserve import embedded
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.resolve import Settings, SettingsError, resolve
from tests.campaigns.ledger import REPOSITORY
from tests.campaigns.outcome import Outcome, TrialFailure
from tests.campaigns.settings.asking import Asking, Text, whole
from tests.campaigns.settings.draw import drawn, generators
from tests.campaigns.settings.serve import ANSWER_SECONDS, Refused, answered, clear, draw_requests, running
from tests.campaigns.settings.special import ADMIN_KEY, ALWAYS, API_KEY, Surroundings, consistent, special
from tests.campaigns.settings.workload import REQUESTS, disturbed, request
from tests.campaigns.watching import captured
from tests.checkpoints import make_checkpoint

FOLDER = REPOSITORY / "build" / "campaigns"
PER_TRIAL = 60
PLAIN = {
    "draft": "none", "profile": False, "threads": 1, "num_blocks": 2000, "log_level": "error",
    "stuck_after": 120.0, "grammar_timeout": 60.0,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint that trials serve: its own precision, size of the vocabulary, and drafts that fit it."""

    path: str
    dtype: str
    vocabulary: int
    around: Surroundings


@dataclass
class Trials:
    """The family: its checkpoints, and the plain engine's texts once they are known."""

    models: dict[str, Model]
    texts: dict[tuple[str, str, str], dict[int, Text]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    requests: int = PER_TRIAL
    numbers: int = REQUESTS
    patience: float = ANSWER_SECONDS

    def trial(self, seed: int) -> Outcome:
        return self.served(seed, *self.settings_of(seed))

    def settings_of(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw the checkpoint and the settings of a trial."""
        rng = Random(f"settings-{seed}")
        name = rng.choices(list(self.models), [1 if name == "embedded" else 2 for name in self.models])[0]
        return name, consistent(rng, drawn(rng, generators(special(self.models[name].around)), ALWAYS))

    def served(self, seed: int, name: str, given: dict[str, Any]) -> Outcome:
        """Serve the requests of a trial with these settings."""
        shown = {"model": name} | {key: value for key, value in given.items() if key != "port"}
        with captured() as log:
            try:
                counts = asyncio.run(self._served(Random(f"requests-{seed}"), name, given))
                log.check()
            except Refused as refused:
                return Outcome(verdict="refused", detail=str(refused), settings=shown)
            except TrialFailure as failure:
                detail = f"{failure.detail}\n{_tail(log.text())}"
                return Outcome(verdict="failed", kind=failure.kind, detail=detail, settings=shown)
        return Outcome(verdict="passed", settings=shown, counts=counts)

    def figures(self) -> dict[str, Any]:
        return {}

    async def _served(self, rng: Random, name: str, given: dict[str, Any]) -> dict[str, int]:
        model = self.models[name]
        settings = resolved(model, given)
        numbers = draw_requests(rng, self.requests, self.numbers)
        asked = [disturbed(request(number, model.vocabulary), rng) for number in numbers]
        expected = await self._expected(name, model, settings)
        invariant = settings.model.backend != "reference" or _dtype(settings, model) == "float32"
        rejection = settings.model.speculation_mode == "rejection"
        counts, report = await answered(
            settings,
            lambda llm, http: Asking(
                llm, http, expected, settings, rng, exact=invariant, greedy_only=rejection
            ),
            asked,
            self.patience,
        )
        return counts | _guards(settings, report)

    async def _expected(self, name: str, model: Model, settings: Settings) -> dict[int, Text]:
        """Return the texts of a plain engine with the same weights and kernels, computed once."""
        dtype, backend = _dtype(settings, model), settings.model.backend
        known = self.texts.setdefault((name, dtype, backend), {})
        if not known:  # all at once: starting the engine takes longer
            plain = resolved(model, {**PLAIN, "dtype": dtype, "backend": backend, "port": 0})
            async with running(plain) as (llm, _):

                async def one(number: int) -> None:
                    known[number] = await whole(llm, replace(request(number, model.vocabulary), edits=()))

                await asyncio.gather(*map(one, range(self.numbers)))
        return known


def resolved(model: Model, given: dict[str, Any]) -> Settings:
    """Return the settings of a trial. Raises Refused if they are refused by name."""
    try:
        return resolve(model.path, given, environ={})
    except (SettingsError, CheckpointError) as error:
        raise clear(error) from error


def _dtype(settings: Settings, model: Model) -> str:
    return model.dtype if settings.model.dtype == "auto" else settings.model.dtype


def _guards(settings: Settings, report: Any) -> dict[str, int]:
    """Return what happened in the workers that the comparison guards."""
    if report is None:
        return {}
    speculation, transfer = report.speculation, report.transfer
    return {
        "pairs": int(bool(settings.server.pairs or settings.server.prefill)),
        "preemptions": report.preemptions,
        "accepted_draft_tokens": speculation.accepted if speculation else 0,
        "transferred_bytes": transfer.sent_bytes if transfer else 0,
    }


def _tail(log: str) -> str:
    found = log.find("Traceback")
    return log[found:][-1200:] if found >= 0 else log[-800:]


def models(folder: Path) -> dict[str, Model]:
    """Return the checkpoints of the family, made in `folder` unless they are there."""
    found = {
        "llama": random_model(folder, "llama", "float32"),
        "qwen3": random_model(folder, "qwen3", "bfloat16", head_dim=16),
    }
    config = msgspec.json.decode((embedded.path("embedded") / "config.json").read_bytes())
    around = Surroundings(
        folder, ("embedded-draft",), config["num_hidden_layers"], config["max_position_embeddings"]
    )
    return found | {"embedded": Model("embedded", "bfloat16", config["vocab_size"], around)}


def random_model(folder: Path, architecture: str, dtype: str, **fields: Any) -> Model:
    """Return a random checkpoint with itself and another as drafts, one always right and one mostly wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "keys").write_text(f"# keys of the trials\n{API_KEY}\n{ADMIN_KEY}\n")
    paths = [folder / architecture, folder / f"{architecture}-draft"]
    for seed, path in enumerate(paths):
        if not (path / "tokenizer_config.json").exists():
            make_checkpoint(path, architecture, dtype, seed=seed, **fields)
    around = Surroundings(folder, (str(paths[0]), str(paths[1])), layers=2, positions=512)
    return Model(str(paths[0]), dtype, 320, around)


@contextmanager
def opened() -> Iterator[Trials]:
    """Set the family up."""
    yield Trials(models(FOLDER))
