"""Converts the tokens of one choice to its output for the client: text, log-probabilities and finish
reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamserve.protocol.messages import FinishReason, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.detokenize import detokenizer
from streamserve.text.latency import SloOutcome
from streamserve.text.message import OutputReader
from streamserve.text.reply_events import ReplyEvent
from streamserve.text.reply_reader import ReplyReader
from streamserve.text.stops import Scan, StopFinder
from streamserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most likely tokens at a position."""

    token: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability and the most likely alternatives.

    `offset` is the number of characters of the choice's text before the token.
    """

    token: int
    bytes: bytes
    logprob: float
    offset: int
    top: tuple[TopToken, ...]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The new output of a choice.

    `text` may lag `tokens`: incomplete characters and possible stop strings are held back. `stop` is the stop
    string or the id of the stop token that ended the choice; None if neither did. The first delta of a
    request has the number of its `cached_tokens`.

    For a reply that is parsed, `text` is the text before it is parsed, `events` is what it consists of, and
    `called` says of the last delta whether the reply ended with a complete tool call.
    """

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | int | None = None
    events: tuple[ReplyEvent, ...] = ()
    called: bool = False
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts, waiting time and SLO outcome of a request: the last item of its output."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queued_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    slo: SloOutcome | None = None


class ChoiceText:
    """Converts the engine's tokens of one choice to deltas. They continue the text of the `prompt`. `emitted`
    is the index of the next token.

    With a `reader`, the text is parsed as a chat reply, and stop strings act only in its answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        choice: int = 0,
        prompt: Sequence[int] = (),
        reader: OutputReader | None = None,
    ) -> None:
        self.choice = choice
        self.emitted = 0
        self.finished = False
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = detokenizer(tokenizer, params.skip_special_tokens, prompt)
        stops = StopFinder(params.stop, params.include_stop_str_in_output)
        self._reply = None if reader is None else ReplyReader(reader, stops)
        self._scanner = stops if self._reply is None else self._reply
        self._length = 0

    def feed(self, event: Token) -> ChoiceDelta | None:
        """Return the delta for the next token; None for a repeated token, and for tokens after the end.

        A stop string ends the choice although the engine continues it: the caller cancels the choice there.
        Raises RuntimeError if a token before this one is missing.
        """
        if self.finished or event.index < self.emitted:
            return None
        if event.index > self.emitted:
            raise RuntimeError(
                f"request {event.request}, choice {self.choice}: got token {event.index}, "
                f"but token {self.emitted} is missing"
            )
        self.emitted += 1
        logprobs = self._logprobs(event)
        finish = event.finish
        stopped = finish == "stop" and event.token in self._params.stop_token_ids
        shown = finish != "stop" or (stopped and self._params.include_stop_str_in_output)
        scan = self._read(self._detokenizer.feed(event.token)) if shown else Scan("")
        if finish is not None and scan.stop is None:
            scan = self._end(scan, cut=stopped or finish != "stop")
        stop: str | int | None = scan.stop
        if scan.stop is not None:
            finish = "stop"
        elif stopped:
            stop = event.token
        return self._delta(scan, finish, stop, (event.token,), logprobs)

    def finish(self, reason: FinishReason) -> ChoiceDelta | None:
        """Return the last delta of a choice that ends without a further token; None if the choice has already
        ended."""
        if self.finished:
            return None
        scan = self._end(Scan(""), cut=reason != "stop")
        return self._delta(scan, reason if scan.stop is None else "stop", scan.stop)

    def _delta(
        self,
        scan: Scan,
        finish: FinishReason | None,
        stop: str | int | None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> ChoiceDelta:
        self.finished = finish is not None
        called = self.finished and self._reply is not None and self._reply.called
        return ChoiceDelta(self.choice, scan.text, tokens, logprobs, finish, stop, scan.events, called)

    def _read(self, text: str) -> Scan:
        """Search `text` for stop strings. The text of the first `min_tokens` tokens is not searched."""
        self._length += len(text)
        return self._scanner.feed(text, searched=self.emitted > self._params.min_tokens)

    def _end(self, scan: Scan, cut: bool) -> Scan:
        """Return `scan` with all held-back text appended. `cut`: the model did not end the text."""
        if cut and self._reply is not None:
            self._reply.cut()
        scan += self._read(self._detokenizer.flush())
        return scan if scan.stop is not None else scan + self._scanner.finish()

    def _logprobs(self, event: Token) -> tuple[TokenLogprob, ...]:
        if event.logprob is None:
            return ()
        top = tuple(
            TopToken(entry.token, self._tokenizer.token_bytes(entry.token), entry.logprob)
            for entry in event.top or ()
        )
        piece = self._tokenizer.token_bytes(event.token)
        return (TokenLogprob(event.token, piece, event.logprob, self._length, top),)
