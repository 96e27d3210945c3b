"""Apply a request's bias, penalties, minimum length and grammar to draft logits along a path, as the target
does. Otherwise drafts would contain tokens that the target must not emit."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from streamserve.contracts.plan import DraftRequest
from streamserve.execution.compute.grammar import GrammarError, Grammars, Matcher
from streamserve.execution.compute.sampling import Row, Scores, adjust
from streamserve.protocol.sampling import SamplingParams


def has_path_state(params: SamplingParams) -> bool:
    """Return whether a request's parameters may change its logits before the temperature."""
    return bool(
        params.penalized
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.grammar is not None
    )


class PathState:
    """The path state of one sequence: its prompt and outputs, and a matcher if it has a grammar.

    The matcher is separate from the target's, because following draft tokens can exhaust a grammar's parser.
    Once the parser has failed, drafting continues without the grammar.
    """

    def __init__(self, request: DraftRequest, eos: Sequence[int], grammars: Grammars | None) -> None:
        self._epoch = request.epoch
        self._params = request.params
        self._choice = request.choice
        self._eos = eos
        prompt_length = request.length - request.output
        self._prompt = np.unique(np.asarray(request.tokens[:prompt_length], dtype=np.int64))
        self._outputs = request.tokens[prompt_length : request.length]
        self._matcher: Matcher | None = None
        if request.params.grammar is not None and grammars is not None:
            try:
                self._matcher = grammars.begin(request.params.grammar, self._outputs)
            except GrammarError:
                self._matcher = None  # the request ends because of the error, or needs no draft tokens

    def matches(self, request: DraftRequest, outputs: Sequence[int]) -> bool:
        """Return whether this state can advance to `request` with `outputs`: it has the same epoch and
        choice, and its outputs are a prefix of `outputs`."""
        same = self._epoch == request.epoch and self._choice == request.choice
        return same and list(outputs[: len(self._outputs)]) == self._outputs

    def commit(self, outputs: Sequence[int]) -> None:
        """Advance to `outputs`, which begin with the outputs known so far."""
        new = outputs[len(self._outputs) :]
        self._outputs += new
        if self._matcher and new:
            self._matcher.commit(new)

    def count_accepted(self, path: Sequence[int]) -> int:
        """Return the number of first tokens in `path` that the grammar and the list of allowed tokens
        accept."""
        listed = self._params.allowed_token_ids
        allowed_length = next(
            (i for i, token in enumerate(path) if listed and token not in listed), len(path)
        )
        return self._matcher.count_accepted(path[:allowed_length]) if self._matcher else allowed_length

    def adjusted(self, logits: Tensor, path: Sequence[int]) -> Scores | None:
        """Return the `logits` [vocabulary] after the outputs and the draft tokens `path`, with all processing
        before the temperature. None if the text ends on the path, or the grammar does not allow it."""
        allowed = None
        if self._matcher and not self._matcher.error:
            if any(self._matcher.ends(token) for token in path):
                return None
            allowed = self._matcher.allowed(path)
            if allowed is None:
                return None
        scores: Scores = logits.double().cpu().numpy()
        row = Row(0, self._params, self._choice, self._prompt, [*self._outputs, *path], allowed)
        adjust(scores, row, self._eos)
        return scores


class PathStates:
    """The path states of the sequences that need one."""

    def __init__(self, eos_token_ids: Sequence[int], grammars: Grammars | None) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._states: dict[int, PathState] = {}

    def of(self, request: DraftRequest) -> PathState | None:
        """Return the state of a request after all its committed tokens; None if it has no path state or asks
        for no draft tokens. A state of another epoch is dropped, because an edit may change prompt, outputs
        and parameters."""
        if not request.depth or not has_path_state(request.params):
            return None
        outputs = request.tokens[request.length - request.output : request.length]
        state = self._states.get(request.id)
        if state is None or not state.matches(request, outputs):
            state = PathState(request, self._eos_token_ids, self._grammars)
            self._states[request.id] = state
        state.commit(outputs)
        return state

    def forget(self, id: int) -> None:
        """Drop the state of sequence `id`."""
        self._states.pop(id, None)
