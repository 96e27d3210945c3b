"""Campaigns draw, count and record correctly; and a few trials of each family, more with --full."""

import itertools
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from streamserve.protocol.config import ModelConfig
from streamserve.settings.options import options
from streamserve.settings.server_config import ServerConfig
from streamserve.system.instructions import KERNEL_PATH_VARIABLE
from tests.campaigns import drive, ledger, levels
from tests.campaigns.drive import FilesEdited, run
from tests.campaigns.families import FAMILIES, Family, open_campaign
from tests.campaigns.ledger import Ledger, contains, merged
from tests.campaigns.mutate import mutated, mutated_bytes
from tests.campaigns.outcome import UNAVAILABLE, WRONG_TEXT, Outcome, TrialFailure
from tests.campaigns.process_output import first_fault
from tests.campaigns.settings import Trials, models
from tests.campaigns.settings.draw import NoGenerator, draw_settings, generators
from tests.campaigns.settings.special import ALWAYS, Environment, consistent, special
from tests.campaigns.slopes import slope
from tests.conftest import Scale
from tests.dependencies import read

ENVIRONMENT = Environment(Path("/nothing"), ("a-draft",), 2, 512)
LIVE = ("http", "websocket", "worker_protocol", "draft_protocol", "join_protocol", "levels", "soak")


def test_every_file_of_the_levels_is_run_as_on_every_lesser_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, str]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        (file,) = (word for word in command if word.startswith("tests/"))
        ran.append((env[KERNEL_PATH_VARIABLE], file))
        return subprocess.CompletedProcess(command, 1, "it failed", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(levels, "lesser_paths", lambda: ["portable", "avx2"])
    files = levels.files()
    assert {
        "tests/exact/test_streams.py",
        "tests/execution/backends/native/test_gemm.py",
        "tests/test_pairs.py",
    } < set(files)
    outcomes = [levels.trial(seed) for seed in range(2 * len(files))]
    assert sorted(ran) == sorted(itertools.product(("portable", "avx2"), files))
    assert {outcome.verdict for outcome in outcomes} == {"failed"}
    assert outcomes[1].settings == {"kernel_path": "avx2", "file": files[0]}
    monkeypatch.setattr(levels, "lesser_paths", list)
    assert levels.trial(0).kind == UNAVAILABLE


def test_every_declared_setting_is_drawn_and_takes_what_is_drawn() -> None:
    table = generators(special(ENVIRONMENT))
    assert set(table) == {option.name for option in options()}
    seen: dict[str, set[str]] = {name: set() for name in table}
    for seed in range(1200):  # the rarest value occurs once in 280 seeds
        for name, value in draw_settings(random.Random(seed), table, ALWAYS).items():
            seen[name].add(repr(value))
            struct = ModelConfig if name in ModelConfig.__struct_fields__ else ServerConfig
            (field,) = (field for field in msgspec.structs.fields(struct) if field.name == name)
            msgspec.convert(value, field.type)
    optional = {
        "kv_transport",
        "draft_model",
        "otlp_traces_endpoint",
        "listen",
        "join_clients",
        "ray_address",
    }
    optional |= {"workers", "pairs", "prefill", "decode"}
    assert {name for name, values in seen.items() if not values} <= optional


def test_a_new_setting_is_drawn_by_its_type() -> None:
    class More(msgspec.Struct, kw_only=True):
        path: str = ""
        share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
        count: Annotated[int, msgspec.Meta(ge=3)] | None = None
        mode: Literal["a", "b"] = "a"
        flag: bool = False

    table = generators({}, [More])
    values = [{name: draw(random.Random(seed)) for name, draw in table.items()} for seed in range(200)]
    assert {value["mode"] for value in values} == {"a", "b"}
    assert {value["flag"] for value in values} == {True, False}
    assert all(0 <= value["share"] <= 1 for value in values)
    assert min(value["count"] for value in values) == 3
    assert max(value["count"] for value in values) > 2**31, "absurd values are drawn too"


def test_a_setting_without_a_generator_is_an_error() -> None:
    class More(msgspec.Struct, kw_only=True):
        path: str = ""
        where: str = ""

    with pytest.raises(NoGenerator, match="where"):
        generators({}, [More])
    with pytest.raises(NoGenerator, match="gone"):
        generators({"gone": lambda rng: 1, "where": lambda rng: ""}, [More])


def test_settings_of_prefill_and_decode_workers_mostly_have_such_workers() -> None:
    table, mismatched = generators(special(ENVIRONMENT)), 0
    for seed in range(500):
        rng = random.Random(seed)
        overrides = consistent(rng, draw_settings(rng, table, ALWAYS))
        paired = overrides.get("pairs") or overrides.get("prefill")
        mismatched += any(name.startswith(("prefill_max", "decode_max")) for name in overrides) and not paired
    assert mismatched < 25


def test_mutations_change_and_never_fail() -> None:
    original = {"a": [1, {"b": "c"}], "d": None}
    results = [mutated(random.Random(seed), original) for seed in range(300)]
    assert original == {"a": [1, {"b": "c"}], "d": None}, "the original is unchanged"
    assert sum(result != original for result in results) > 250
    assert len({mutated_bytes(random.Random(seed), b"0123456789") for seed in range(50)}) > 40


def test_ranges_of_seeds() -> None:
    assert merged([(5, 5), (0, 1), (2, 2), (4, 4)]) == [(0, 2), (4, 5)]
    assert contains([(0, 2), (4, 5)], 4)
    assert not contains([(0, 2), (4, 5)], 3)


def test_a_slope_is_that_of_the_line() -> None:
    assert slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert slope([1.0, 1.0], [5.0, 7.0]) == 0.0


def test_the_first_fault_of_a_log() -> None:
    log = (
        "all well\nTraceback (most recent call last):\n  File x\nValueError: a\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File y\nKeyError: b\nnext line\n"
    )
    assert first_fault("all well\n") == ""
    assert first_fault(log).endswith("KeyError: b")


class Scripted:
    """A family whose seed 3 fails while it is `broken`, and whose seed 5 is interrupted."""

    def __init__(self, broken: bool = True, interrupted: bool = False) -> None:
        self.broken, self.interrupted = broken, interrupted
        self.ran: list[int] = []

    def trial(self, seed: int) -> Outcome:
        self.ran.append(seed)
        if seed == 3 and self.broken:
            raise TrialFailure(WRONG_TEXT, "not that one")
        if seed == 5 and self.interrupted:
            raise KeyboardInterrupt
        return Outcome(verdict="refused" if seed == 1 else "passed", counts={"requests": 2})

    def figures(self) -> dict[str, Any]:
        return {"rounds": len(self.ran)}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs the scripted family with a given content hash, and returns the entries of
    its ledger."""

    def run_family(family: Scripted, content: str, trials: int) -> Ledger:
        @contextmanager
        def open_campaign(_: Family) -> Iterator[Scripted]:
            yield family

        monkeypatch.setattr(drive, "open_campaign", open_campaign)
        monkeypatch.setattr(Family, "content", lambda _: content)
        run("settings", 60, trials=trials, folder=tmp_path)
        return ledger.read("settings", tmp_path)

    return run_family


def test_seeds_accumulate_over_runs_and_failed_ones_come_first_after_a_change(scripted: Any) -> None:
    first = scripted(Scripted(), "one", 3)
    assert (first.now.seeds, first.now.trials, first.now.refused) == ([(0, 2)], 3, 1)
    second = scripted(Scripted(), "one", 2)
    assert (second.now.seeds, second.now.failed[WRONG_TEXT]) == ([(0, 4)], 1)
    assert [failure.seed for failure in second.now.failures] == [3]
    fixed = Scripted(broken=False)
    third = scripted(fixed, "two", 3)
    assert fixed.ran == [3, 5, 6]
    assert third.now.seeds == [(3, 3), (5, 6)]
    assert (third.earlier.commits, third.earlier.trials, third.earlier.failing) == (1, 5, [3])
    assert third.to_replay() == []
    fourth = scripted(Scripted(broken=False), "three", 1)
    assert fourth.earlier.failing == [], "it passed"
    assert fourth.now.seeds == [(7, 7)]


def test_trials_do_not_count_if_their_files_were_edited_meanwhile(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted(Scripted(), "one", 3)

    class Editing(Scripted):
        def trial(self, seed: int) -> Outcome:
            monkeypatch.setattr(Family, "content", lambda _: "two")
            return super().trial(seed)

    with pytest.raises(FilesEdited, match="settings depends on were edited"):
        scripted(Editing(), "one", 2)
    stored = ledger.read("settings", tmp_path)
    assert (stored.content, stored.now.trials) == ("one", 3)


def test_a_seed_that_is_run_again_is_one_trial() -> None:
    entry = ledger.Entry()
    for seed in (1, 2, 1):
        entry.add(seed, Outcome(verdict="refused"), 1.0)
    assert (entry.trials, entry.refused, entry.seeds) == (2, 2, [(1, 2)])


def test_trials_of_several_machines_name_them(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a, 2 cores", "b, 4 cores", "a, 2 cores"):
        monkeypatch.setattr(ledger, "machine", lambda name=name: name)
        found = scripted(Scripted(broken=False), "one", 1)
    assert (found.now.machine, found.now.trials) == ("a, 2 cores; b, 4 cores", 3)


def test_trials_of_a_file_that_counted_by_commit_become_totals(scripted: Any, tmp_path: Path) -> None:
    scripted(Scripted(), "", 5)
    path = tmp_path / "settings.json"
    path.write_text(path.read_text().replace(' "content": "",\n', ""))
    ledger_after = scripted(Scripted(broken=False), "one", 1)
    assert ledger_after.earlier.trials == 5
    assert ledger_after.now.seeds == [(3, 3)], "the seed that failed"


def test_a_family_depends_on_its_own_files() -> None:
    tree = read()
    assert {family.file for family in FAMILIES.values()} <= tree.files.keys()
    assert len({family.content() for family in FAMILIES.values()}) == len(FAMILIES)
    simulated = tree.closure([FAMILIES["simulated_settings"].file])
    assert "src/streamserve/engine/engine.py" in simulated
    assert "src/streamserve/api/app.py" not in simulated
    assert "src/streamserve/api/app.py" in tree.closure([FAMILIES["http"].file])


def test_a_run_ends_where_its_family_is_not_permitted(scripted: Any) -> None:
    class Forbidden(Scripted):
        def trial(self, seed: int) -> Outcome:
            return Outcome(verdict="refused", kind=UNAVAILABLE)

    assert scripted(Forbidden(), "one", 50).now.refused == 1


def test_an_interruption_records_completed_trials(scripted: Any) -> None:
    ledger_after = scripted(Scripted(broken=False, interrupted=True), "one", 50)
    assert ledger_after.now.seeds == [(0, 4)]
    assert ledger_after.now.counts == {"requests": 10}
    assert ledger_after.now.figures == {"rounds": 6}


def test_settings_are_served_as_a_plain_engine_would(
    tmp_path_factory: pytest.TempPathFactory, scale: Scale, record: Callable[..., None]
) -> None:
    """Settings are served as a plain engine would: 20 trials on all checkpoints. tests/simulate draws
    settings for virtual time."""
    if not scale.full:
        pytest.skip("with --full")
    folder = tmp_path_factory.mktemp("campaign")
    trials = Trials(models(folder), requests=60, numbers=120)
    counts: Counter[str] = Counter()
    for seed in range(scale.seed, scale.seed + 20):
        outcome = trials.trial(seed)
        assert outcome.verdict != "failed", f"seed {seed}: {outcome.kind}\n{outcome.detail}"
        counts.update(outcome.counts)
    assert counts["compared"] > 10
    record(**counts)


@pytest.mark.parametrize("family", LIVE)
def test_trials_of_the_live_families(family: str, scale: Scale) -> None:
    if not scale.full:
        pytest.skip("with --full; `make verify` runs slices of each for minutes besides")
    with open_campaign(FAMILIES[family]) as campaign:
        for seed in range(scale.seed, scale.seed + 3):
            outcome = drive.attempt(campaign, seed)
            assert outcome.verdict == "passed", (seed, outcome)
