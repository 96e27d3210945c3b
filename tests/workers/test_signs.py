"""A worker's step shows signs of progress in its journal, which the server reads."""

import mmap
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.fleet.process_state import PROGRESS_FACTOR
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.journal import JOURNAL_BYTES, Entry, read_journal
from streamserve.protocol.messages import Cancel, LoadAdapter
from streamserve.protocol.sampling import SamplingParams
from streamserve.workers.journal import COMPILING_SECONDS, LOADING_SECONDS, Signs, StepJournal
from streamserve.workers.signs import signs_of
from tests.checkpoints import make_checkpoint
from tests.exact.generating import generate


class Worker:
    """A journal whose signs and clock a test sets."""

    def __init__(self, longest_part: float = 1.0) -> None:
        self.now, self.layers, self.compiled = 100.0, 0, 0
        self._memory = mmap.mmap(-1, JOURNAL_BYTES)
        self.journal = StepJournal(self._memory, lambda: self.now)
        self.journal.signs = Signs(lambda: self.layers, lambda: self.compiled, longest_part)
        self.journal.beat()

    def later(self, seconds: float, layers: int = 0, compiled: int = 0) -> Entry:
        """Return the signs that the server reads after some time, in which this amount was computed or
        compiled."""
        self.now, self.layers, self.compiled = (
            self.now + seconds, self.layers + layers, self.compiled + compiled,
        )  # fmt: skip
        self.journal.beat()
        return read_journal(self._memory)


def test_each_layer_and_each_phase_is_progress() -> None:
    worker = Worker()
    worker.journal.enter("run", [], 1.0)
    assert worker.later(3.0).moved_at == 100.0, "the phase began"
    assert worker.later(3.0, layers=1).moved_at == 106.0
    entry = worker.later(50.0)
    assert (entry.beat_at, entry.moved_at, entry.predicted) == (156.0, 106.0, 1.0)
    worker.journal.enter("commit", [])
    assert worker.later(1.0).moved_at == 156.0


def test_the_signs_of_a_closed_model_are_not_read() -> None:
    """The signs of a closed model are not read: a thread reads them, possibly at the moment when the model is
    closed."""
    worker = Worker()
    reading, closed, errors = threading.Event(), threading.Event(), []

    def progress() -> int:
        reading.set()
        if closed.wait(0.2):
            errors.append("read after the model was closed")
        return 0

    worker.journal.signs = Signs(progress)
    beating = threading.Thread(target=worker.journal.beat)
    beating.start()
    assert reading.wait(5.0)
    worker.journal.signs = Signs()
    closed.set()
    beating.join()
    assert not errors
    assert worker.later(1.0).beat_at == 101.0


def test_while_kernels_are_compiled_nothing_else_is_expected() -> None:
    worker = Worker()
    worker.journal.enter("run", [], 1.0)
    assert worker.later(1.0, compiled=1).moved_at == 101.0 + COMPILING_SECONDS
    assert worker.later(60.0).moved_at == 101.0 + COMPILING_SECONDS
    assert worker.later(1.0, layers=1).moved_at == 162.0
    worker.later(1.0, compiled=2)
    worker.journal.leave([])
    assert worker.later(1.0).moved_at == 164.0, "the step has ended"


def test_loading_an_adapter_takes_longer_than_other_messages() -> None:
    worker = Worker()
    worker.journal.note(LoadAdapter("f", "/adapter"))
    entry = worker.later(0.0)
    assert (entry.phase, entry.predicted) == ("message", LOADING_SECONDS)
    assert PROGRESS_FACTOR * entry.predicted >= 120
    worker.journal.note(Cancel("r"))
    assert worker.later(0.0).predicted == 0.0


def test_a_step_is_expected_to_show_progress_after_each_of_its_parts() -> None:
    worker = Worker(longest_part=0.25)
    for phase, predicted in (("run", 2.0), ("verify", 2.0), ("swap", 8.0), ("draft", 8.0)):
        worker.journal.enter(phase, [], 8.0)
        assert worker.later(0.0).predicted == predicted, phase


def test_a_first_step_that_was_never_measured_may_be_long() -> None:
    """A first step that was never measured may be long: its time is predicted for another machine, and it
    touches memory and libraries for the first time."""
    worker = Worker(longest_part=0.25)
    for measured, first in ((True, 2.0), (False, LOADING_SECONDS), (False, 2.0)):
        worker.journal.signs = replace(worker.journal.signs, measured=measured)
        worker.journal.enter("run", [], 8.0)
        assert worker.later(0.0).predicted == first
        if not measured:
            worker.journal.enter("commit", [])


@pytest.mark.parametrize(
    ("config", "vocab_size", "part"),
    [({}, 320, 1 / 4), ({}, 4096, 0.5), ({"backend": "torch"}, 320, 1 / 4), ({"backend": "device"}, 320, 1)],
    ids=["layers", "head", "torch", "device"],
)
def test_the_longest_part_is_a_layer_or_the_head_and_a_devices_whole_step(
    config: dict[str, str], vocab_size: int, part: float, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, num_hidden_layers=4, vocab_size=vocab_size, tie_word_embeddings=True)
    loaded = load(ModelConfig(path=str(folder), num_blocks=8, threads=1, **config))
    signs = signs_of(loaded, measured=False)
    assert signs.longest_part == pytest.approx(part, rel=0.5 if vocab_size > 320 else 1e-6)
    assert signs.longest_part >= 1 / 4
    before = signs.progress()
    engine = Engine(loaded.engine_config, loaded.model_info, loaded.executor, lambda: 0.0)
    generate(engine, [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), 1)
    assert signs.progress() - before == 4 * 4, "every layer of every step gives a sign"
    loaded.executor.close()
