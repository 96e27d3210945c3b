"""What a request's own path does to its logits, for a draft as for the target: bias, penalties, minimum
length, grammar. A draft that knew nothing of it would guess what the target must not say."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from streamserve.engine.plan import DraftRequest
from streamserve.execution.grammar import GrammarError, Grammars, Matcher
from streamserve.execution.sampling import Row, Scores, adjust
from streamserve.protocol.sampling import SamplingParams


def has_path_state(params: SamplingParams) -> bool:
    """Whether anything but the temperature and what follows it may change a request's logits."""
    return bool(
        params.penalized
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.grammar is not None
    )


class PathState:
    """The state of one sequence: its prompt and outputs, and a matcher of its own where it has a grammar.

    Walking guesses can exhaust a grammar's parser; the target's matcher never hears of it, and who cannot
    follow the grammar any more guesses without."""

    def __init__(
        self, request: DraftRequest, tokens: Sequence[int], eos: Sequence[int], grammars: Grammars | None
    ) -> None:
        """`tokens`: all committed tokens, `request.output` outputs at their end."""
        self._epoch = request.epoch
        self._params = request.params
        self._choice = request.choice
        self._eos = eos
        prompt_length = len(tokens) - request.output
        self._prompt = np.unique(np.asarray(tokens[:prompt_length], dtype=np.int64))
        self._outputs = list(tokens[prompt_length:])
        self._matcher: Matcher | None = None
        if request.params.grammar is not None and grammars is not None:
            try:
                self._matcher = grammars.begin(request.params.grammar, self._outputs)
            except GrammarError:
                self._matcher = None  # the request is about to end for it, or has no need of guesses

    def holds(self, request: DraftRequest, outputs: Sequence[int]) -> bool:
        """Whether this is the state of `request` before its last `outputs`: of the same epoch, for the same
        choice, and behind outputs that still hold."""
        same = self._epoch == request.epoch and self._choice == request.choice
        return same and list(outputs[: len(self._outputs)]) == self._outputs

    def commit(self, outputs: Sequence[int]) -> None:
        """Go on to `outputs`, which begin with those known so far."""
        new = outputs[len(self._outputs) :]
        self._outputs += new
        if self._matcher and new:
            self._matcher.commit(new)

    def prefix(self, path: Sequence[int]) -> int:
        """How many guesses of `path` the grammar and the list of allowed tokens let through."""
        listed = self._params.allowed_token_ids
        known = next((i for i, token in enumerate(path) if listed and token not in listed), len(path))
        return self._matcher.prefix(path[:known]) if self._matcher else known

    def adjusted(self, logits: Tensor, path: Sequence[int]) -> Scores | None:
        """The `logits` [vocabulary] behind the outputs and the guesses `path` with all that comes before the
        temperature applied; None where the grammar has no more to say."""
        allowed = None
        if self._matcher and not self._matcher.error:
            if any(self._matcher.ends(token) for token in path):
                return None
            allowed = self._matcher.allowed(path)
            if allowed is None:
                return None
        scores: Scores = logits.double().numpy()
        row = Row(0, self._params, self._choice, self._prompt, [*self._outputs, *path], allowed)
        adjust(scores, row, self._eos)
        return scores


class PathStates:
    """The states of those sequences that have one."""

    def __init__(self, eos_token_ids: Sequence[int], grammars: Grammars | None) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._states: dict[int, PathState] = {}

    def of(self, request: DraftRequest, tokens: Sequence[int]) -> PathState | None:
        """The state after all committed `tokens`, for a request that asks for guesses. A state of another
        epoch is dropped: an edit changes prompt, outputs and parameters alike."""
        if not request.depth or not has_path_state(request.params):
            return None
        outputs = tokens[len(tokens) - request.output :]
        state = self._states.get(request.id)
        if state is None or not state.holds(request, outputs):
            state = PathState(request, tokens, self._eos_token_ids, self._grammars)
            self._states[request.id] = state
        state.commit(outputs)
        return state

    def forget(self, id: int) -> None:
        """Sequence `id` is no more."""
        self._states.pop(id, None)
