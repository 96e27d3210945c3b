"""Chains of draft tokens on a device: one captured loop over all levels, without the host between them.

    host     read | prepare the loop | launch | wait                              | tokens
    device        ███ read ███ choose ███ pass 1 ███ choose ███ pass 2 ███ choose
                                      └──────────── one graph ────────────────┘

All passes after the reading pass have one row per chain and one common shape. Positions, slots and limits of
every level follow from the chains' starts, so one upload holds all levels. Attention is planned once, for the
slots of the whole chains; the limits of a level say which of these slots its pass sees. A chain that has
ended computes a padding row.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.contracts.plan import Span
from streamserve.execution.backends.cuda.buffers import Arrays, BufferFields, Field, Uploads, new_event
from streamserve.execution.backends.cuda.draws import DRAW_WORDS
from streamserve.execution.backends.cuda.graphs import ROWS, bucket
from streamserve.execution.backends.cuda.passes import (
    MAX_PASSES,
    PLACES,
    SMALLEST_TILE,
    ForwardShape,
    PreparedPass,
    SampleShape,
    forward_fields,
    forward_shapes,
    padding,
)
from streamserve.execution.backends.cuda.runner import Runner, finite_rows, greedy_draws, to_host
from streamserve.execution.drafters.chains import Chains
from streamserve.execution.model.layout import Ints, lay_out


@dataclass(frozen=True)
class LoopShape:
    """The shape of a captured loop: `passes` forward passes of the shape `level`."""

    passes: int
    level: ForwardShape


class DeviceStopwatch:
    """Measures the seconds between its construction and `stop`, on the device where there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = [new_event(timed=True) for _ in range(2)] if device.type == "cuda" else []
        self._times = [time.perf_counter()] * 2
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        """Record the end of the measured time: when the device has done all work launched so far."""
        self._times[1] = time.perf_counter()
        if self._events:
            self._events[1].record()

    def wait(self) -> float:
        """Wait for all work launched before `stop`; return the measured seconds."""
        if not self._events:
            return self._times[1] - self._times[0]
        begun, ended = self._events
        ended.synchronize()
        milliseconds: float = begun.elapsed_time(ended)
        return milliseconds / 1000


@dataclass
class DraftedChains:
    """Implements ChainsInFlight: `drafted` [levels, 2, rows] tokens and probabilities, and `finite` [rows],
    in flight to the host."""

    chains: int
    drafted: Tensor
    finite: Tensor
    placed: bool
    stopwatch: DeviceStopwatch
    seconds: float = 0.0

    def place(self, chain: int, level: int) -> int:
        """Implement ChainsInFlight.place."""
        return 2 * level * self.drafted.shape[2] + chain

    def wait(self) -> Chains:
        """Implement ChainsInFlight.wait."""
        self.seconds = self.stopwatch.wait()
        results = self.drafted.numpy()[:, :, : self.chains]
        return Chains(results[:, 0], results[:, 1].view(np.float32), self.finite.numpy())


class DeviceChains:
    """Drafts chains (ChainDrafting) with the model of `runner`."""

    def __init__(self, runner: Runner, target: Runner | None = None) -> None:
        """Make a drafter that leaves draft tokens in the results of `target`, whose passes read them there;
        without a target, in a buffer that no other runner reads."""
        self.runner = runner
        self._target = target
        device, largest = runner.model.device, LoopShape(MAX_PASSES, ForwardShape(ROWS[-1], 0, (), True))
        self._uploads = Uploads(device, self._fields(largest).size)
        unplaced = torch.zeros(PLACES if target is None else 0, dtype=torch.int32, device=device)
        self._places = unplaced if target is None else target.places

    @torch.inference_mode()
    def warm_up(self, chains: int, levels: int) -> None:
        """Compile and capture the passes that draft up to `chains` chains of up to `levels` tokens. Their
        inputs are padding alone."""
        most, runner = bucket(chains) or ROWS[-1], self.runner
        scored = [SampleShape(rows, 1, scored=True) for rows in reversed(ROWS) if rows <= most]
        runner.warm_up(forward_shapes(most * (levels + 1)), scored)
        for shape in loop_shapes(most, levels):
            fields = self._fields(shape)
            self._uploads.upload(fields, padding(fields))
            drafted = self._drafted(shape.passes + 1, shape.level.rows)
            work = partial(self._passes, fields.views(self._uploads.buffer), shape, drafted)
            runner.graphs.prepare(shape, work)

    def fits(self, chains: int, length: int) -> bool:
        """Implement ChainDrafting.fits."""
        return chains <= ROWS[-1] and length <= MAX_PASSES + 1

    def follows(self, spans: Sequence[Span]) -> bool:
        """Implement ChainDrafting.follows: False for a model with windows, whose first slots would depend on
        results that the host does not know yet."""
        windows = any(window is not None for window in self.runner.windows)
        rows = sum(len(span.tokens) for span in spans)
        return self._target is not None and not windows and rows <= ROWS[-1]

    @torch.inference_mode()
    def draft(self, spans: Sequence[Span], lengths: Sequence[int]) -> DraftedChains:
        """Implement ChainDrafting.draft: launch everything, and wait for nothing."""
        return self._draft(spans, np.array(lengths), DeviceStopwatch(self.runner.model.device))

    @torch.inference_mode()
    def follow(self, spans: Sequence[Span], lengths: Sequence[int]) -> DraftedChains:
        """Implement ChainDrafting.follow: launch everything, and wait for nothing."""
        assert self._target
        stopwatch, count = DeviceStopwatch(self.runner.model.device), len(spans)
        accepted, tokens = (part[:count] for part in self._target.walked)
        width = tokens.shape[1]
        known = torch.arange(width, device=tokens.device) < accepted[:, None]
        self.runner.places[: count * width].view(count, width).copy_(torch.where(known, tokens, 0).clamp(0))
        placed = [_from_places(span, chain * width) for chain, span in enumerate(spans)]
        return self._draft(placed, np.array(lengths), stopwatch, accepted - 1)

    def _draft(
        self, spans: Sequence[Span], lengths: Ints, stopwatch: DeviceStopwatch, after: Tensor | None = None
    ) -> DraftedChains:
        """Draft after the spans or, if `after` [chains] is given, after their first 1 + after[i] tokens."""
        runner, levels = self.runner, int(lengths.max())
        layout = lay_out(spans, runner.cache.block_size)
        hidden = runner.forward(layout)
        finite = to_host(finite_rows(hidden))
        last = [part.root if after is None else part.offset for part in layout.parts]
        chosen = runner.choose_likeliest(np.array(last, np.int32), after)
        drafted = self._drafted(levels, chosen.shape[1])
        drafted[0].copy_(chosen)
        if levels > 1:
            self._loop(spans, lengths, drafted, after)
        host = to_host(drafted)
        runner.waits += 1
        stopwatch.stop()
        return DraftedChains(len(spans), host, finite, self._target is not None, stopwatch)

    def _loop(self, spans: Sequence[Span], lengths: Ints, drafted: Tensor, after: Tensor | None) -> None:
        """Launch the passes over all draft tokens except each chain's last. `drafted` [levels, 2, rows]:
        memory for tokens and their probabilities; it already has level 0."""
        ends = np.array([span.start + len(span.tokens) for span in spans])
        prepared = self._prepare(spans, ends, lengths)
        starts = ends if after is None else np.array([span.start + 1 for span in spans])
        shape = LoopShape(int(lengths.max()) - 1, prepared.shape)
        fields, buffer = self._fields(shape), self._uploads.buffer
        views = fields.views(buffer)
        self._uploads.upload(fields, self._arrays(prepared, shape, starts, lengths))
        if after is not None:
            self._shift(views, after)
        self.runner.graphs.run(shape, lambda: self._passes(views, shape, drafted))

    def _shift(self, views: Mapping[str, Tensor], after: Tensor) -> None:
        """Move the rows of chain i by after[i] positions."""
        chains, size = len(after), self.runner.cache.block_size
        live = views["sources"][:, :chains] >= 0
        positions, slots = views["positions"][:, :chains], views["slots"][:, :chains]
        positions += after * live
        views["limits"][:, :chains] += after * live
        blocks = self.runner.tables[:chains].gather(1, (positions // size).t().long()).t()
        slots.copy_(torch.where(live, blocks * size + positions % size, slots))

    def _prepare(self, spans: Sequence[Span], starts: Ints, lengths: Ints) -> PreparedPass:
        """Prepare a pass with one row per chain that sees the slots of the whole chains."""
        ends = [
            Span(span.sequence, start + max(length - 2, 0), [0], span.blocks)
            for span, start, length in zip(spans, starts.tolist(), lengths.tolist(), strict=True)
        ]
        layout = lay_out(ends, self.runner.cache.block_size)
        # The windows of the first pass reach furthest back: the plan must have their slots.
        prepared = self.runner.prepare(replace(layout, positions=np.minimum(starts, layout.positions)))
        return replace(prepared, shape=replace(prepared.shape, combined=True))  # one loop fewer to capture

    def _drafted(self, levels: int, rows: int) -> Tensor:
        """Return the memory [levels, 2, rows] for draft tokens and their probabilities."""
        return self._places[: levels * 2 * rows].view(levels, 2, rows)

    def _arrays(self, prepared: PreparedPass, shape: LoopShape, starts: Ints, lengths: Ints) -> Arrays:
        """Return the arrays of a loop: the arrays of `prepared`, where an array that differs between levels
        has a row for each level."""
        runner, rows, block_size = self.runner, shape.level.rows, self.runner.cache.block_size
        chains, levels = np.arange(len(starts)), np.arange(shape.passes)[:, None]
        fed = levels < lengths - 1
        positions = np.where(fed, starts + levels, 0)
        slots = prepared.tables[chains, positions // block_size] * block_size + positions % block_size
        by_level = {
            "sources": _padded(np.where(fed, chains, -1), rows, -1),
            "positions": _padded(positions, rows, 0),
            "slots": _padded(np.where(fed, slots, runner.padding_slot), rows, runner.padding_slot),
            "limits": _padded(np.where(fed, positions + 1, 0), rows, 0),
        }
        for number, window in enumerate(runner.windows):
            firsts = positions * 0 if window is None else np.maximum(positions - (window - 1), 0)
            by_level[f"firsts {number}"] = _padded(firsts, rows, 0)
        return {**prepared.arrays, **by_level, "draws": greedy_draws(rows)}

    def _passes(self, views: Mapping[str, Tensor], shape: LoopShape, drafted: Tensor) -> None:
        """Do the passes of a loop, each fed with the tokens that the previous one chose."""
        for level in range(shape.passes):
            inputs = {name: view[level] if _differs(name) else view for name, view in views.items()}
            drafted[level + 1].copy_(self.runner.extend(inputs, shape.level))

    def _fields(self, shape: LoopShape) -> BufferFields:
        return _loop_fields(shape, len(self.runner.windows), self.runner.padding_slot)


def loop_shapes(chains: int, levels: int) -> list[LoopShape]:
    """Return the loops that draft up to `chains` chains of up to `levels` tokens, the largest first."""
    return [
        LoopShape(passes, ForwardShape(rows, 0, SMALLEST_TILE, True))
        for rows in reversed(ROWS)
        if rows <= chains
        for passes in range(levels - 1, 0, -1)
    ]


@lru_cache(maxsize=1024)
def _loop_fields(shape: LoopShape, windows: int, padding_slot: int) -> BufferFields:
    """Return where the arrays of a loop lie."""
    rows, fields = shape.level.rows, forward_fields(shape.level, windows, padding_slot).fields
    by_level = (
        replace(field, shape=(shape.passes, rows)) if _differs(field.name) else field for field in fields
    )
    return BufferFields((Field("draws", (rows, DRAW_WORDS)), *by_level))


def _from_places(span: Span, first: int) -> Span:
    """Return a span whose tokens are on the device, at consecutive places from `first` on. Token -1 - p
    stands for the token at place p (passes.PLACES)."""
    tokens = [-1 - place for place in range(first, first + len(span.tokens))]
    return Span(span.sequence, span.start, tokens, span.blocks)


def _differs(name: str) -> bool:
    """Return whether an array of a forward pass differs from level to level."""
    return name in ("sources", "positions", "slots", "limits") or name.startswith("firsts ")


def _padded(values: Ints, rows: int, padding: int) -> NDArray[np.int32]:
    """Return `values` [levels, chains], padded to [levels, rows]."""
    padded = np.full((len(values), rows), padding, np.int32)
    padded[:, : values.shape[1]] = values
    return padded
