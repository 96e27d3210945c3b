"""Parses one choice's reply into events, and ends it at a stop string in its answer."""

import json

from streamserve.text.message import OutputReader
from streamserve.text.reply_events import CallArguments, CallBegin, CallEnd, ReplyEvent, TextDelta
from streamserve.text.stops import Scan, StopFinder


class ReplyReader:
    """Parses one reply. Used like a StopFinder; each scan also has the events of its text.

    A stop string acts only in the answer. Reasoning and calls are not searched, and no stop string spans
    them.
    """

    def __init__(self, reader: OutputReader, stops: StopFinder) -> None:
        self._reader = reader
        self._stops = stops
        self._searched = True
        self._begun = False  # a call
        self._ended = False  # the latest call
        self._arguments: list[str] = []  # of the latest call
        self._cut = False

    @property
    def called(self) -> bool:
        """Whether tools were called, and the last call is complete. Valid at the end of the reply."""
        return self._begun and self._complete

    def feed(self, text: str, searched: bool = True) -> Scan:
        """Parse the next piece. Stop strings that end in a piece that is not `searched` do not act."""
        self._searched = searched
        return self._scan(text, self._reader.read(text, False))

    def cut(self) -> None:
        """Record that the reply was cut short: a call that is incomplete at its end stays incomplete."""
        self._cut = True

    def finish(self) -> Scan:
        """Return the text and events that were held back. Call this at the end of the reply."""
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
                found += [*_text(self._stops.finish()), event]
                self._note(event)
        if final:
            found += _text(self._stops.finish())
        return Scan(text, None, tuple(found))

    def _note(self, event: ReplyEvent) -> None:
        """Note an event of a call."""
        if isinstance(event, CallBegin):
            self._begun, self._ended, self._arguments = True, False, []
        elif isinstance(event, CallArguments):
            self._arguments.append(event.text)
        elif isinstance(event, CallEnd):
            self._ended = True

    @property
    def _complete(self) -> bool:
        """Whether the latest call has ended, or its arguments are JSON."""
        if self._ended:
            return True
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return False
        return True


def _text(scan: Scan) -> list[ReplyEvent]:
    return [TextDelta(scan.text)] if scan.text else []
