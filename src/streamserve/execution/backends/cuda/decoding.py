"""Decoding steps, whose arrays are updated from the arrays of the previous step: in each row, position, slot
and output number grow by one, and sometimes the block table gets a block.

    begin    layout of a step   ->  DecodingStep, if it only decodes       arrays made from the spans
    follow   spans after that   ->  DecodingStep                           arrays updated
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamserve.contracts.plan import UNKNOWN_TOKEN, Sampled, Span, SpanResult
from streamserve.execution.backends.cuda.attention import Int32s, block_tables
from streamserve.execution.backends.cuda.draws import OUTPUT, pack_outputs
from streamserve.execution.backends.cuda.passes import Nodes
from streamserve.execution.compute.branches import ActiveSequence
from streamserve.execution.compute.sampling import NOT_FINITE
from streamserve.execution.model.layout import Layout


@dataclass(frozen=True)
class DecodingStep:
    """A step in which every span has one token, the device chooses the next one, and no request asks for
    anything but the token. Row i belongs to sequence `ids[i]` with the state `states[i]`. `sources` maps rows
    whose token is not known yet to the row of the step before that chooses it. `draws` is [rows, words]."""

    layout: Layout
    ids: list[int]
    states: list[ActiveSequence]
    draws: Int32s
    sources: Mapping[int, int]

    @property
    def nodes(self) -> Nodes:
        """The nodes to sample at: all rows."""
        count, layout = len(self.ids), self.layout
        return Nodes(
            rows=np.arange(count, dtype=np.int32),
            tokens=layout.tokens.astype(np.int32),
            parents=np.full(count, -1, np.int32),
            slots=layout.slots.astype(np.int32),
            firsts=np.arange(count + 1, dtype=np.int32),
            draws=self.draws,
            depth=1,
        )

    def commit(self, tokens: Sequence[int]) -> list[SpanResult]:
        """Append the chosen `tokens` to the sequences' outputs, and return the results."""
        results = []
        for id, state, token in zip(self.ids, self.states, tokens, strict=True):
            if token == NOT_FINITE:
                results.append(SpanResult(id, [], not_finite=True))
            else:
                state.outputs.append(token)
                results.append(SpanResult(id, [[Sampled(token)]]))
        return results


class Decoding:
    """Makes decoding steps. Keeps the arrays of the step launched last, if it was a decoding step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: DecodingStep | None = None

    def begin(
        self,
        layout: Layout,
        sequences: Mapping[int, ActiveSequence],
        packed: Mapping[int, bytes],
        sources: Mapping[int, int],
    ) -> DecodingStep | None:
        """Return the decoding step with the rows of `layout`; None if the step is not a decoding step.
        `sequences`, and the parameters of their draws (`packed`), are by the sequence's id."""
        self._last = None
        spans = layout.spans
        if len(layout.tokens) != len(spans) or not all(map(_chooses_one_token, spans)):
            return None
        ids = [span.sequence for span in spans]
        states = [sequences[id] for id in ids]
        if not all(map(_only_token_wanted, states)):
            return None
        draws = pack_outputs(
            [packed[id] for id in ids],
            [span.choices[0] for span in spans],
            [len(state.outputs) + span.follows for span, state in zip(spans, states, strict=True)],
        )
        tables = block_tables(layout, layout.positions + 1, self._block_size)
        self._last = DecodingStep(replace(layout, tables=tables), ids, states, draws, sources)
        return self._last

    def follow(self, spans: Sequence[Span]) -> DecodingStep | None:
        """Return the decoding step of `spans`, if all of them follow spans of the last decoding step;
        otherwise None. The last step may have had more sequences."""
        last, self._last = self._last, None
        if last is None or not spans or not all(span.follows for span in spans):
            return None
        ids, rows = [span.sequence for span in spans], list(range(len(spans)))
        if ids == last.ids:
            states, draws, before = last.states, last.draws.copy(), last.layout
        else:
            row_of = {id: row for row, id in enumerate(last.ids)}
            rows = [row_of[id] for id in ids]
            states, draws, before = (
                [last.states[row] for row in rows],
                last.draws[rows],
                _chosen(last.layout, rows),
            )
        draws[:, OUTPUT] += 1
        layout = self._next(before, spans)
        self._last = DecodingStep(layout, ids, states, draws, dict(enumerate(rows)))
        return self._last

    def _next(self, before: Layout, spans: Sequence[Span]) -> Layout:
        """Return the layout of `spans`, which are one token after the rows of `before`."""
        positions, slots, tables, size = (
            before.positions + 1,
            before.slots + 1,
            before.tables,
            self._block_size,
        )
        assert tables is not None
        width = int(positions.max()) // size + 1
        entering = np.flatnonzero(positions % size == 0).tolist()
        if entering or width < tables.shape[1]:
            kept = tables[:, :width]
            tables = np.zeros((len(spans), width), np.int32)
            tables[:, : kept.shape[1]] = kept
        for row in entering:
            number = spans[row].start // size
            tables[row, number] = block = spans[row].blocks[number]
            slots[row] = block * size
        unknown = np.full(len(spans), UNKNOWN_TOKEN)
        return Layout(spans, np.arange(len(spans)), unknown, positions, slots, tables)


def _chosen(layout: Layout, rows: Sequence[int]) -> Layout:
    """Return the layout of the rows `rows` of a decoding step."""
    assert layout.tables is not None
    spans = [layout.spans[row] for row in rows]
    return Layout(
        spans, np.arange(len(rows)), layout.tokens[rows], layout.positions[rows], layout.slots[rows],
        layout.tables[rows],
    )  # fmt: skip


def _chooses_one_token(span: Span) -> bool:
    tree = span.tree
    return (
        tree is not None
        and len(tree.tokens) == len(span.choices) == 1
        and not tree.draws
        and span.prompt_logprobs is None
    )


def _only_token_wanted(state: ActiveSequence) -> bool:
    """Whether a sequence's next token depends only on its logits, temperature, filters and noise, and its
    request asks for nothing but tokens."""
    params = state.params
    return not (
        state.adjusted or state.error or params.logprobs is not None or len(state.outputs) < params.min_tokens
    )
