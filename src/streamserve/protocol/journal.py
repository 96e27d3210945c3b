"""A worker's journal: its current work, in memory that it shares with the server.

The server can read it even if the worker has crashed.

    64 B  beat        times of the worker's last sign of life and of the step's last progress
    2 x   slot        checksum of the rest, number, phase, count of attempts, when the phase began,
                      predicted seconds, attempts
    512 B last words  why the worker ends, and the name of its crash report

The two slots are written alternately: if a worker dies while it writes one, the other is intact. Writing a
slot takes some microseconds. Times are of the clock that all processes of a machine share
(time.monotonic).
"""

import mmap
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

MAX_ATTEMPTS = 4096
"""Maximum number of attempts in an entry. An entry of more attempts says "all"."""

_BEAT = struct.Struct("<dd")
_HEAD = struct.Struct("<QIidd")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = 64
_SLOT_BYTES = _HEAD.size + _CHECK.size + 8 * MAX_ATTEMPTS
_LAST_WORDS_BYTES = 512
_LAST_WORDS_OFFSET = _HEADER_BYTES + 2 * _SLOT_BYTES
JOURNAL_BYTES = _LAST_WORDS_OFFSET + _LAST_WORDS_BYTES

PHASES = ("", "message", "plan", "draft", "run", "verify", "swap", "commit", "transfer")
"""The phases of a worker. The empty one is waiting."""

_CODES = {phase: code for code, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class Entry:
    """A worker's state: a phase since `began`, with these attempts (None: all). `predicted`: seconds of the
    longest part of the phase that shows no progress. `beat_at` and `moved_at`: its last signs of life and of
    progress. `words`: why it ended, as it wrote itself. `report`: the name of its crash report."""

    phase: str = ""
    attempts: frozenset[int] | None = frozenset()
    began: float = 0.0
    predicted: float = 0.0
    beat_at: float = 0.0
    moved_at: float = 0.0
    words: str = ""
    report: str = ""


class JournalWriter:
    """Writes one worker's journal into `memory` of JOURNAL_BYTES."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.number = 0
        """The number of the last entry."""
        self._memory = memory

    def write(self, phase: str, attempts: Sequence[int] | None, now: float, predicted: float = 0.0) -> None:
        """Record that the worker is in `phase` with these attempts (None: all) from `now` on."""
        self.number += 1
        count, attempt_bytes = -1, b""
        if attempts is not None and len(attempts) <= MAX_ATTEMPTS:
            count, attempt_bytes = len(attempts), array("q", attempts).tobytes()
        entry = _HEAD.pack(self.number, _CODES[phase], count, now, predicted) + attempt_bytes
        offset = _HEADER_BYTES + self.number % 2 * _SLOT_BYTES
        self._memory[offset : offset + _CHECK.size + len(entry)] = _CHECK.pack(crc32(entry)) + entry

    def beat(self, now: float, moved_at: float) -> None:
        """Record a sign of life at `now`, and the time `moved_at` of the step's last progress."""
        _BEAT.pack_into(self._memory, 0, now, moved_at)

    def say(self, words: str, report: str) -> None:
        """Write why the worker ends (its last words), and the name of a crash report."""
        text = f"{report}\n{words}".encode()[:_LAST_WORDS_BYTES]
        self._memory[_LAST_WORDS_OFFSET : _LAST_WORDS_OFFSET + len(text)] = text


def read_journal(memory: mmap.mmap) -> Entry:
    """Return the latest complete entry of a journal."""
    beat_at, moved_at = _BEAT.unpack_from(memory, 0)
    slots = [slot for slot in (_slot(memory, 0), _slot(memory, 1)) if slot]
    text = (
        memory[_LAST_WORDS_OFFSET : _LAST_WORDS_OFFSET + _LAST_WORDS_BYTES]
        .rstrip(b"\0")
        .decode(errors="replace")
    )
    report, _, words = text.partition("\n")
    if not slots:
        return Entry(beat_at=beat_at, moved_at=moved_at, words=words, report=report)
    _, phase, attempts, began, predicted = max(slots, key=lambda slot: slot[0])
    return Entry(phase, attempts, began, predicted, beat_at, max(began, moved_at), words=words, report=report)


def _slot(memory: mmap.mmap, number: int) -> tuple[int, str, frozenset[int] | None, float, float] | None:
    """Return the contents of a slot; None if it was never written, or not completely."""
    check_at = _HEADER_BYTES + number * _SLOT_BYTES
    head_at = check_at + _CHECK.size
    written, code, count, began, predicted = _HEAD.unpack_from(memory, head_at)
    if not written or count > MAX_ATTEMPTS or code >= len(PHASES):
        return None
    named_at = head_at + _HEAD.size
    end = named_at + 8 * max(count, 0)
    (check,) = _CHECK.unpack_from(memory, check_at)
    if check != crc32(memory[head_at:end]):
        return None
    attempts = None if count < 0 else frozenset(array("q", memory[named_at:end]))
    return written, PHASES[code], attempts, began, predicted
