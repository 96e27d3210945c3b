"""Parse a chat reply incrementally into reasoning, content and tool calls."""

from dataclasses import dataclass, field

from streamserve.text.reasoning import ThoughtReader
from streamserve.text.tools.reader import CallDelta, CallReader


@dataclass
class Part:
    """The output of one parsed piece of text."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class MessageReader:
    """Parses one message: the reasoning first, then the tool calls in what follows.

    Without parsers, all text is content.
    """

    def __init__(self, thoughts: ThoughtReader | None = None, calls: CallReader | None = None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._calls is not None and self._calls.calls > 0

    def read(self, text: str, final: bool) -> Part:
        """Parse the next piece; if it is the `final` one, also return what was held back."""
        reasoning, said = "", text
        if self._thoughts is not None:
            thought = self._thoughts.feed(text)
            reasoning, said = thought.reasoning, thought.content
            if final:
                rest = self._thoughts.finish()
                reasoning, said = reasoning + rest.reasoning, said + rest.content
        if self._calls is None:
            return Part(reasoning, said)
        found = self._calls.feed(said)
        if final:
            rest_found = self._calls.finish()
            return Part(reasoning, found.content + rest_found.content, found.calls + rest_found.calls)
        return Part(reasoning, found.content, found.calls)
