"""The server can read a worker's journal however the worker ended."""

import mmap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.observer import StepPhase
from streamserve.protocol.journal import (
    JOURNAL_BYTES,
    MAX_ATTEMPTS,
    PHASES,
    Entry,
    JournalWriter,
    read_journal,
)


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, JOURNAL_BYTES)


def test_a_journal_that_was_never_written_accuses_no_request(memory: mmap.mmap) -> None:
    assert read_journal(memory) == Entry()


def test_the_latest_entry_counts(memory: mmap.mmap) -> None:
    writer = JournalWriter(memory)
    writer.write("plan", None, 1.0)
    assert read_journal(memory).attempts is None
    writer.write("run", [3, -1, 3], 2.0, 0.5)
    writer.beat(2.5, 2.25)
    assert read_journal(memory) == Entry("run", frozenset((3, -1)), 2.0, 0.5, 2.5, 2.25)
    writer.write("", [], 3.0)
    writer.say("KeyError in phase run", "1.json")
    assert read_journal(memory) == Entry(
        began=3.0, beat_at=2.5, moved_at=3.0, words="KeyError in phase run", report="1.json"
    )


def test_more_attempts_than_it_can_name_are_all(memory: mmap.mmap) -> None:
    JournalWriter(memory).write("run", list(range(MAX_ATTEMPTS + 1)), 1.0)
    assert read_journal(memory).attempts is None


def test_every_phase_of_a_step_has_a_number() -> None:
    assert set(StepPhase.__args__) < set(PHASES)


@given(st.lists(st.integers(-5, 1 << 40), max_size=40), st.data())
def test_a_torn_entry_leaves_the_one_before(attempts: list[int], data: st.DataObject) -> None:
    """An incomplete entry leaves the entry before it readable: the worker died after writing a part of an
    entry."""
    memory, whole = mmap.mmap(-1, JOURNAL_BYTES), mmap.mmap(-1, JOURNAL_BYTES)
    for journal in (memory, whole):
        writer = JournalWriter(journal)
        writer.write("run", [7], 0.5)
        writer.write("draft", [1, 2], 1.0)
    before = bytes(memory)
    JournalWriter.write(writer, "commit", attempts, 2.0)
    after = bytes(whole)
    changed = [at for at in range(JOURNAL_BYTES) if before[at] != after[at]]
    kept = data.draw(st.integers(0, len(changed) - 1))
    for at in changed[:kept]:
        memory[at] = after[at]
    assert read_journal(memory) == read_journal_of(before)
    assert read_journal(whole).phase == "commit"


def read_journal_of(content: bytes) -> Entry:
    memory = mmap.mmap(-1, JOURNAL_BYTES)
    memory[:] = content
    return read_journal(memory)


def test_an_entry_takes_microseconds(memory: mmap.mmap, record) -> None:
    writer, attempts = JournalWriter(memory), list(range(64))
    started = time.perf_counter()
    for _ in range(2000):
        writer.write("run", attempts, 1.0, 2.0)
    seconds = (time.perf_counter() - started) / 2000
    record(microseconds_for_64_sequences=round(1e6 * seconds, 2))
    assert seconds < 1e-3
