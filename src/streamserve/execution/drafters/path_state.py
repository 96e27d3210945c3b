"""Apply to draft logits what a request's path does to the target's: bias, penalties, minimum length,
grammar. Without it, a draft would contain tokens that the target must not emit."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from streamserve.contracts.plan import DraftRequest
from streamserve.execution.grammar import GrammarError, Grammars, Matcher
from streamserve.execution.sampling import Row, Scores, adjust
from streamserve.protocol.sampling import SamplingParams


def has_path_state(params: SamplingParams) -> bool:
    """Return whether a request's logits are changed by anything before the temperature."""
    return bool(
        params.penalized
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.grammar is not None
    )


class PathState:
    """The state of one sequence: its prompt and outputs, and a separate matcher if it has a grammar.

    Following draft tokens can exhaust a grammar's parser. The target's matcher is not affected; once the
    parser has failed, drafting continues without the grammar.
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
                self._matcher = None  # the request is about to end because of it, or needs no draft tokens

    def matches(self, request: DraftRequest, outputs: Sequence[int]) -> bool:
        """Return whether this is the state of `request` before its last `outputs`: of the same epoch, for the
        same choice, and with outputs that are still a prefix of `outputs`."""
        same = self._epoch == request.epoch and self._choice == request.choice
        return same and list(outputs[: len(self._outputs)]) == self._outputs

    def commit(self, outputs: Sequence[int]) -> None:
        """Advance to `outputs`, which begin with those known so far."""
        new = outputs[len(self._outputs) :]
        self._outputs += new
        if self._matcher and new:
            self._matcher.commit(new)

    def count_accepted(self, path: Sequence[int]) -> int:
        """Return how many draft tokens of `path` the grammar and the list of allowed tokens accept."""
        listed = self._params.allowed_token_ids
        allowed_length = next(
            (i for i, token in enumerate(path) if listed and token not in listed), len(path)
        )
        return self._matcher.count_accepted(path[:allowed_length]) if self._matcher else allowed_length

    def adjusted(self, logits: Tensor, path: Sequence[int]) -> Scores | None:
        """Return the `logits` [vocabulary] after the outputs and the draft tokens `path`, with all processing
        that precedes the temperature; None where the text ends or the grammar does not allow `path`."""
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
        """Return the state after all committed tokens, for a request that asks for draft tokens. A state of
        another epoch is dropped: an edit may change prompt, outputs and parameters."""
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
