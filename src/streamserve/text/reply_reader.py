"""Parses one choice's reply into events, and ends it at a stop string in its answer."""

import json

from streamserve.text.message import OutputReader
from streamserve.text.reply_events import CallArguments, CallBegin, CallEnd, ReplyEvent, TextDelta
from streamserve.text.stops import Scan, StopFinder


class ReplyReader:
    """Parses one reply. Used like a StopFinder; each scan also has the events of its text.

    A stop string acts only in the answer. Reasoning and calls are not searched, and no stop string spans
    them. Arguments that are null become an empty object.
    """

    def __init__(self, reader: OutputReader, stops: StopFinder) -> None:
        self._reader = reader
        self._stops = stops
        self._searched = True
        self._latest: CallBegin | None = None
        self._ended = False  # the latest call
        self._arguments: list[str] = []  # of the latest call
        self._held = ""  # arguments that may be null
        self._cut = False

    @property
    def called(self) -> bool:
        """Whether tools were called, and the last call is complete. Valid at the end of the reply."""
        return self._latest is not None and self._complete

    def feed(self, text: str, searched: bool = True) -> Scan:
        """Parse the next piece. Stop strings that end in a piece that is not `searched` do not act."""
        self._searched = searched
        return self._scan(text, self._reader.read(text, False))

    def cut(self) -> None:
        """Note that the model did not end the reply: the parser does not complete a call at its end."""
        self._cut = True

    def finish(self) -> Scan:
        """Return what was held back. Call this at the end of the reply."""
        return self._scan("", self._reader.read("", True, self._cut), final=True)

    def _scan(self, text: str, events: list[ReplyEvent], final: bool = False) -> Scan:
        """Return the events up to the first stop string in the answer."""
        found: list[ReplyEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                scan = self._stops.feed(event.text, self._searched)
                found += _text(scan)
                if scan.stop is not None:
                    return Scan(text, scan.stop, tuple(found))
            else:
                found += [*_text(self._stops.finish()), *self._other(event)]
        if final:
            found += [*self._held_arguments(), *_text(self._stops.finish())]
        return Scan(text, None, tuple(found))

    def _other(self, event: ReplyEvent) -> list[ReplyEvent]:
        """Return an event outside of the answer. Arguments are held back while they may be null."""
        if isinstance(event, CallBegin):
            self._latest, self._ended, self._arguments = event, False, []
        elif isinstance(event, CallArguments):
            text = self._held + event.text
            self._held = text if not self._arguments and "null".startswith(text) else ""
            if self._held:
                return []
            self._arguments.append(text)
            return [CallArguments(event.index, text)]
        elif isinstance(event, CallEnd):
            self._ended = True
            return [*self._held_arguments(), event]
        return [event]

    def _held_arguments(self) -> list[ReplyEvent]:
        if not self._held or self._latest is None:
            return []
        self._arguments, self._held = ["{}" if self._held == "null" else self._held], ""
        return [CallArguments(self._latest.index, self._arguments[0])]

    @property
    def _complete(self) -> bool:
        """Whether the latest call has ended, or its arguments are JSON."""
        if self._ended:
            return True
        try:
            json.loads("".join(self._arguments) + self._held)
        except (ValueError, RecursionError):
            return False
        return True


def _text(scan: Scan) -> list[ReplyEvent]:
    return [TextDelta(scan.text)] if scan.text else []
