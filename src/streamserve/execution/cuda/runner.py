"""Runs a model's passes on a device: uploads a step's inputs, pads to a shape, launches, never waits.

forward   layout  ->  hidden [rows]           one upload, one graph
sample    nodes   ->  tokens, accepted paths  one upload, one graph; the KV of accepted nodes is moved
fetch     results ->  host                    one copy; Fetch.wait is the step's only wait
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.cuda.attention import (
    AttentionArrays,
    AttentionWork,
    plan_attention,
    workspace_size,
)
from streamserve.execution.cuda.buffers import Arrays, Field, Fields, Uploads, new_event
from streamserve.execution.cuda.draws import DRAW_WORDS, Draw, pack_draws
from streamserve.execution.cuda.graphs import ROWS, Graphs, bucket
from streamserve.execution.cuda.model import DeviceModel, ForwardInputs
from streamserve.execution.cuda.operations import Operations
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.layout import Ints, Layout
from streamserve.protocol.sampling import SamplingParams

Int32s = NDArray[np.int32]

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Tokens of the longest path of a step's trees, root included, that steps are padded to."""

MAX_PARTIALS = 8192
"""Partial results of attention, each of one query token and a part of its keys, that the workspace holds."""

MAX_WORDS = 4
"""Words of the tree masks that captured passes have at most: trees of up to 128 nodes."""

MAX_ITEMS = 4096
"""Pieces of attention's work in a step, in addition to one for each row."""

CPU_MULTIPROCESSORS = 4
"""What attention's work is planned for where there is no GPU."""


@dataclass(frozen=True)
class ForwardShape:
    """What a captured forward pass is for. `words`: of the tree masks; `tiles`: which tile sizes of attention
    occur; `combined`: whether any row's keys are split."""

    rows: int
    words: int
    tiles: tuple[bool, ...]
    combined: bool


@dataclass(frozen=True)
class SampleShape:
    """What a captured sampling pass is for: `nodes` rows of logits, of trees with paths of up to `depth`
    tokens. `scored`: single tokens, with the probability of the likeliest one."""

    nodes: int
    depth: int
    scored: bool = False

    @property
    def results(self) -> int:
        """Numbers that the pass returns: tokens, or lengths, tokens and paths."""
        return self.nodes * (1 + self.scored if self.depth == 1 else 1 + 2 * self.depth)


@dataclass(frozen=True)
class Nodes:
    """The tree nodes to sample at, tree by tree (int32). Those of the first `trees` trees are walked on the
    device; the logits of the others are read by the host.

    `rows` [nodes] of the hidden states, `draws` [nodes, words] (cuda/draws.py), the draft `tokens`, their
    `parents` and the `slots` of their KV [nodes], `firsts` [trees + 1] where each walked tree starts and the
    last one ends; `depth`: tokens of the longest path, root included.
    """

    rows: Int32s
    tokens: Int32s
    parents: Int32s
    slots: Int32s
    firsts: Int32s
    draws: Int32s
    depth: int

    @property
    def shape(self) -> SampleShape:
        """The padded shape. Raises ValueError for trees that are too deep."""
        depth = bucket(self.depth, DEPTHS)
        if depth is None:
            raise ValueError(f"a token tree has {self.depth} levels; at most {DEPTHS[-1]} are verified")
        return SampleShape(bucket(len(self.rows)) or len(self.rows), depth)


@dataclass(frozen=True)
class PreparedPass:
    """A forward pass of so many `rows`: its shape, its arrays, and the block `tables` of its spans, which are
    on their way to the device."""

    shape: ForwardShape
    arrays: Arrays
    tables: Int32s
    rows: int


@dataclass(frozen=True)
class Fetch:
    """Results in flight to the host; they are valid after `wait`. With depth 1 the tokens [nodes] alone;
    otherwise lengths [nodes], tokens and paths [nodes, depth] of trees 0, 1, … `finite` [rows]: whether each
    row's hidden state is finite, if that was asked for."""

    shape: SampleShape | None
    host: Tensor
    finite_rows: Tensor | None
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait for the device."""
        if self.event is not None:
            self.event.synchronize()

    def walks(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return tokens and path of the first `count` trees."""
        if self.shape is None:
            return []
        nodes, depth, results = self.shape.nodes, self.shape.depth, self.host.numpy()
        if depth == 1:
            return [([token], [0]) for token in results[:count].tolist()]
        lengths = results[:count].tolist()
        tokens, paths = results[nodes : nodes * (1 + 2 * depth)].reshape(2, nodes, depth)[:, :count].tolist()
        return [(t[:n], p[:n]) for t, p, n in zip(tokens, paths, lengths, strict=True)]

    @property
    def finite(self) -> NDArray[np.bool_] | None:
        return None if self.finite_rows is None else self.finite_rows.numpy()


class Runner:
    """Runs `model` over `cache`, whose last block takes the KV of padding rows and belongs to no sequence."""

    def __init__(
        self,
        model: DeviceModel,
        cache: KVCache,
        operations: Operations,
        graphs: Graphs,
        max_sequences: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.graphs = graphs
        self.waits = 0
        spec, device = model.spec, model.device
        self._operations = operations
        self.windows = tuple(dict.fromkeys(spec.windows))
        self.padding_slot = (cache.data.shape[1] - 1) * cache.block_size
        self._multiprocessors = _multiprocessors(device)
        width = -(-model.max_positions // cache.block_size)
        self._tables = torch.zeros(max_sequences, width, dtype=torch.int32, device=device)
        self._workspace = torch.empty(
            workspace_size(MAX_PARTIALS, spec.num_heads, spec.head_dim), dtype=torch.float32, device=device
        )
        self._table_uploads = Uploads(device, max_sequences * width)
        largest = ForwardShape(ROWS[-1], MAX_WORDS, (), True)
        self._forward_uploads = Uploads(device, self._forward_fields(largest).size)
        self._sample_uploads = Uploads(device, _sample_fields(SampleShape(ROWS[-1], DEPTHS[-1])).size)
        self._hidden = torch.zeros(ROWS[-1], spec.hidden_size, dtype=model.dtype, device=device)
        self._states = self._hidden
        """The hidden states of the last forward pass: a tensor of their own for more than ROWS[-1] rows."""
        self._results = torch.zeros(ROWS[-1] * (1 + 2 * DEPTHS[-1]), dtype=torch.int32, device=device)
        self._logits: dict[SampleShape, Tensor] = {}
        self._sampled: SampleShape | None = None
        self._last_forward: tuple[Hashable, Callable[[], None]]
        self._last_sample: tuple[Hashable, Callable[[], None]]

    @property
    def firsts(self) -> int:
        """How many passes took longer than later ones will, to compile or to capture."""
        return self.graphs.firsts

    def forward(self, layout: Layout, sources: Mapping[int, int] | None = None) -> Tensor:
        """Launch a forward pass; return the hidden states [rows, hidden], which the next pass overwrites.
        `sources[i]`: the tree of the sampling pass before whose token is that of the i-th span's one row."""
        return self.launch(self.prepare(layout, sources))

    def prepare(self, layout: Layout, sources: Mapping[int, int] | None = None) -> PreparedPass:
        """Prepare a forward pass, and launch the upload of its block tables."""
        spec, rows = self.model.spec, len(layout.tokens)
        plan = plan_attention(
            layout, self.cache.block_size, spec.num_heads // spec.num_kv_heads, spec.num_kv_heads,
            self.windows, self._multiprocessors, MAX_PARTIALS,
        )  # fmt: skip
        self._upload_tables(plan.tables)
        arrays = self._forward_arrays(layout, plan, _sources(layout, sources or {}))
        return PreparedPass(_forward_shape(rows, plan), arrays, plan.tables, rows)

    def launch(self, prepared: PreparedPass) -> Tensor:
        """Launch the pass prepared last; return the hidden states as `forward`."""
        shape, arrays, rows = prepared.shape, prepared.arrays, prepared.rows
        fields = self._forward_fields(shape)
        if rows > ROWS[-1] or shape.words > MAX_WORDS:
            uploads = Uploads(self.model.device, fields.size)
            uploads.upload(fields, arrays)
            hidden = self._hidden.new_empty(rows, self._hidden.shape[1])
            self._forward(fields.views(uploads.buffer), shape, hidden)
            self._states = hidden
            return hidden
        self._states = self._hidden
        self._forward_uploads.upload(fields, arrays)
        views, hidden = fields.views(self._forward_uploads.buffer), self._hidden[: shape.rows]
        self._last_forward = shape, lambda: self._forward(views, shape, hidden)
        self.graphs.run(*self._last_forward)
        return hidden[:rows]

    def sample(self, nodes: Nodes) -> Tensor:
        """Launch the sampling of tokens at `nodes`, from the last forward pass; return the nodes' logits
        [nodes, vocabulary], which the next sampling pass overwrites. The KV of accepted nodes is moved to the
        slots after the root. Raises ValueError for more nodes than the results have memory for."""
        shape = self._sampled = nodes.shape
        if shape.results > len(self._results):
            raise ValueError(f"a step cannot verify {shape.nodes} nodes with paths of {shape.depth} tokens")
        return self._launch_sample(shape, _sample_arrays(nodes, shape))[: len(nodes.rows)]

    def choose_likeliest(self, rows: Int32s) -> Tensor:
        """Launch the choice of the likeliest token at each of `rows` of the last forward pass, which the next
        pass may take from there (`sources`). Returns the tokens and then the bits of their float32
        probabilities [2, nodes], nodes padded; the next choice overwrites them."""
        shape = SampleShape(bucket(len(rows)) or len(rows), 1, scored=True)
        self._launch_sample(shape, {"rows": rows, "draws": _greedy_draws(len(rows))})
        return self._results[: shape.results].view(2, shape.nodes)

    def _launch_sample(self, shape: SampleShape, arrays: Arrays) -> Tensor:
        """Launch a sampling pass; return the logits [nodes, vocabulary], nodes padded."""
        fields = _sample_fields(shape)
        if shape.nodes > ROWS[-1] or self._states is not self._hidden:
            # Captured graphs have other inputs.
            uploads = Uploads(self.model.device, fields.size)
            uploads.upload(fields, arrays)
            return self._sample(fields.views(uploads.buffer), shape)
        self._sample_uploads.upload(fields, arrays)
        views = fields.views(self._sample_uploads.buffer)
        self._last_sample = shape, lambda: self._keep_logits(views, shape)
        self.graphs.run(*self._last_sample)
        return self._logits[shape]

    def fetch(self, rows: Tensor | None) -> Fetch:
        """Launch the copy of the last sampling pass's results to the host. With the hidden states of `rows`,
        whether they are finite is copied too."""
        shape, self._sampled = self._sampled, None
        host = to_host(self._results[: 0 if shape is None else shape.results])
        finite = None if rows is None else to_host(finite_rows(rows))
        return Fetch(shape, host, finite, self.mark())

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all that was launched, to be waited for: there is none on the CPU."""
        self.waits += 1
        if self.model.device.type != "cuda":
            return None
        event = new_event()
        event.record()
        return event

    def replay(self) -> None:
        """Launch the last forward and sampling passes again, with the inputs that are on the device: for
        measurements."""
        for shape, work in (self._last_forward, self._last_sample):
            self.graphs.run(shape, work)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits [rows, vocabulary] of the next token."""
        return self.model.logits(hidden)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Launch copies of whole blocks (source, destination), in order."""
        self.cache.copy_blocks(copies)

    def move_slots(self, sources: Ints, destinations: Ints) -> None:
        """Launch copies of slots: every source is read before any destination is written."""
        self.cache.move_slots(sources, destinations)

    def close(self) -> None:
        """Release nothing: there are no other processes."""

    def _forward(self, views: Mapping[str, Tensor], shape: ForwardShape, hidden: Tensor) -> None:
        works = {
            window: AttentionWork(**{name: views[f"{name} {number}"] for name in AttentionWork._fields})
            for number, window in enumerate(self.windows)
        }
        inputs = ForwardInputs(
            views["tokens"], views["sources"], self._results, views["positions"], views["slots"],
            self._tables, views["limits"], works, shape.tiles, shape.combined,
        )  # fmt: skip
        self.model.forward(inputs, self.cache, self._workspace, hidden)

    def _keep_logits(self, views: Mapping[str, Tensor], shape: SampleShape) -> None:
        """As `_sample`; a captured pass writes the logits to the same memory at each replay."""
        self._logits[shape] = self._sample(views, shape)

    def _sample(self, views: Mapping[str, Tensor], shape: SampleShape) -> Tensor:
        hidden = self._states.index_select(0, views["rows"])
        logits = self.model.logits(hidden)
        nodes, depth, results = shape.nodes, shape.depth, self._results
        if depth == 1:
            self._operations.sampling.choose_tokens(logits, views["draws"], results[:nodes])
            if shape.scored:
                likeliest = logits.log_softmax(-1, torch.float32).amax(-1).exp()
                results[nodes : 2 * nodes].view(torch.float32).copy_(likeliest)
            return logits
        chosen = torch.empty(nodes, dtype=torch.int32, device=results.device)
        self._operations.sampling.choose_tokens(logits, views["draws"], chosen)
        lengths = results[:nodes]
        tokens, paths = results[nodes : nodes * (1 + 2 * depth)].view(2, nodes, depth)
        firsts, slots = views["firsts"], views["slots"]
        self._operations.verify.walk_trees(
            chosen, views["tokens"], views["parents"], firsts, tokens, paths, lengths
        )
        self._operations.verify.compact(self.cache.data, slots, firsts, paths, lengths)
        return logits

    def _upload_tables(self, tables: Int32s) -> None:
        """Copy block tables [sequences, width], whose width differs from step to step, to their places."""
        field = Fields((Field("tables", tables.shape),))
        self._table_uploads.upload(field, {"tables": tables})
        view = field.views(self._table_uploads.buffer)["tables"]
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(view)

    def _forward_fields(self, shape: ForwardShape) -> Fields:
        rows, fields = shape.rows, []
        for number, _ in enumerate(self.windows):
            fields += [
                Field(f"starts {number}", (4,)),
                Field(f"firsts {number}", (rows,)),
                Field(f"bits {number}", (rows, shape.words)),
                Field(f"combine {number}", (rows, 3)),
                Field(f"items {number}", (MAX_ITEMS + rows, 8), ragged=number == len(self.windows) - 1),
            ]
        padding = self.padding_slot
        return Fields(
            (
                Field("tokens", (rows,)),
                Field("sources", (rows,), -1),
                Field("positions", (rows,)),
                Field("slots", (rows,), padding),
                Field("limits", (rows,)),
                *fields,
            )
        )

    def _forward_arrays(self, layout: Layout, plan: AttentionArrays, sources: Int32s) -> Arrays:
        arrays: dict[str, NDArray[np.integer]] = {
            "tokens": layout.tokens,
            "sources": sources,
            "positions": layout.positions,
            "slots": layout.slots,
            "limits": plan.limits,
        }
        for number, window in enumerate(self.windows):
            work = plan.works[window]
            arrays |= {f"{name} {number}": getattr(work, name) for name in AttentionWork._fields}
        return arrays


def attention_shape(plan: AttentionArrays) -> tuple[tuple[bool, ...], bool]:
    """Return which tile sizes occur in a step, and whether any row has partial results to combine."""
    works = plan.works.values()
    tiles = np.any([np.diff(work.starts) > 0 for work in works], axis=0)
    return tuple(tiles.tolist()), any(bool(work.combine[:, 2].any()) for work in works)


def _forward_shape(rows: int, plan: AttentionArrays) -> ForwardShape:
    words = max(work.bits.shape[1] for work in plan.works.values())
    return ForwardShape(bucket(rows) or rows, words, *attention_shape(plan))


def _sources(layout: Layout, sources: Mapping[int, int]) -> Int32s:
    rows = np.full(len(layout.tokens), -1, np.int32)
    for span, source in sources.items():
        rows[layout.parts[span].offset] = source
    return rows


@lru_cache
def _sample_fields(shape: SampleShape) -> Fields:
    nodes = shape.nodes
    plain = Field("rows", (nodes,)), Field("draws", (nodes, DRAW_WORDS))
    if shape.depth == 1:
        return Fields(plain)
    names = "tokens", "parents", "slots"
    return Fields((*plain, *(Field(name, (nodes,)) for name in names), Field("firsts", (nodes + 1,))))


def _sample_arrays(nodes: Nodes, shape: SampleShape) -> Arrays:
    """Return the arrays; the padding trees are empty."""
    firsts = np.full(shape.nodes + 1, nodes.firsts[-1], np.int32)
    firsts[: len(nodes.firsts)] = nodes.firsts
    return {
        "rows": nodes.rows,
        "draws": nodes.draws,
        "tokens": nodes.tokens,
        "parents": nodes.parents,
        "slots": nodes.slots,
        "firsts": firsts,
    }


def finite_rows(hidden: Tensor) -> Tensor:
    """Return which rows of `hidden` [rows, hidden] are finite."""
    return hidden.sum(-1, dtype=torch.float32).isfinite()


@lru_cache
def _greedy_draws(count: int) -> Int32s:
    return pack_draws([Draw(SamplingParams(temperature=0.0), 0, 0)] * count)


def to_host(tensor: Tensor) -> Tensor:
    """Launch a copy to pinned memory; on the CPU, return a copy."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
