"""Search for stop strings across token boundaries."""

from dataclasses import dataclass

from streamserve.text.reply_events import ReplyEvent


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of one piece of text: `text` may be sent now, `stop` is the stop string that ended it.

    `events` are what a ReplyReader finds in the text.
    """

    text: str
    stop: str | None = None
    events: tuple[ReplyEvent, ...] = ()

    def __add__(self, later: "Scan") -> "Scan":
        return Scan(self.text + later.text, later.stop, self.events + later.events)


class StopFinder:
    """Scans a text character by character and holds back text that may be the beginning of a stop string.

    The stop string that is complete first wins; of two complete at once, the longer wins. So the result does
    not depend on how the text is split into pieces.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include_stop
        self._held = ""

    def feed(self, text: str, searched: bool = True) -> Scan:
        """Scan the next piece. Stop strings that end in a piece that is not `searched` do not act.

        After a scan that has a `stop`, the text has ended and `feed` is not called again.
        """
        if not (self._patterns and searched):
            return Scan(text)
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.read(character)]
            if complete:
                return self._stopped(seen[:end], max(complete, key=len))
        held_back = max(pattern.matched for pattern in self._patterns)
        self._held = seen[len(seen) - held_back :]
        return Scan(seen[: len(seen) - held_back])

    def finish(self) -> Scan:
        """Return the text that was held back. Call this at the end of the text; the next piece begins another
        text."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.matched = 0
        return Scan(held)

    def _stopped(self, seen: str, stop: str) -> Scan:
        self._held = ""
        return Scan(seen if self._include else seen[: len(seen) - len(stop)], stop)


class _Pattern:
    """One stop string, and the length of its prefix that the text ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * (len(text) + 1)
        for length in range(2, len(text) + 1):
            self._fallback[length] = self._step(self._fallback[length - 1], text[length - 1])

    def read(self, character: str) -> bool:
        """Advance by one character; return whether the stop string is complete now."""
        self.matched = self._step(self.matched, character)
        return self.matched == len(self.text)

    def _step(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        return matched + 1 if self.text[matched] == character else 0
