"""Run a model's passes on a device: upload a step's inputs, pad them to a shape, launch, never wait.

forward   layout  ->  hidden [rows]           one upload, one graph
sample    nodes   ->  tokens, accepted paths  one upload, one graph; the KV of accepted nodes is moved
fetch     results ->  host                    one copy; Fetch.wait is the step's only wait
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.backends.cuda.attention import AttentionWork, plan_attention, workspace_size
from streamserve.execution.backends.cuda.buffers import Arrays, BufferFields, Field, Uploads, new_event
from streamserve.execution.backends.cuda.draws import Draw, pack_draws
from streamserve.execution.backends.cuda.graphs import ROWS, Graphs, bucket
from streamserve.execution.backends.cuda.model import DeviceModel, ForwardInputs
from streamserve.execution.backends.cuda.operations import Operations
from streamserve.execution.backends.cuda.passes import (
    DEPTHS,
    MAX_WORDS,
    PLACES,
    RESULTS,
    ForwardShape,
    Int32s,
    Nodes,
    PreparedPass,
    SampleShape,
    forward_arrays,
    forward_fields,
    forward_shape,
    padding,
    sample_arrays,
    sample_fields,
)
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.layout import Ints, Layout
from streamserve.protocol.sampling import SamplingParams

MAX_PARTIALS = 8192
"""Capacity of attention's workspace in partial results, each of one query token and a part of its keys."""

CPU_MULTIPROCESSORS = 4
"""Number of multiprocessors that attention's work is planned for on a CPU."""


@dataclass(frozen=True)
class Fetch:
    """Results in flight to the host; they are valid after `wait`.

    * `host`: with depth 1, the tokens [nodes]; otherwise lengths [nodes], tokens and paths [nodes, depth] of
      trees 0, 1, …
    * `finite_rows` [rows]: whether each row's hidden state is finite; None if it was not requested.
    """

    shape: SampleShape | None
    host: Tensor
    finite_rows: Tensor | None
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait for the device."""
        if self.event is not None:
            self.event.synchronize()

    def tokens(self, count: int) -> list[int]:
        """Return the tokens of the first `count` nodes. Requires depth 1."""
        tokens: list[int] = self.host.numpy()[:count].tolist()
        return tokens

    def walks(self, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the tokens and the accepted path of the first `count` trees."""
        if self.shape is None:
            return []
        nodes, depth, results = self.shape.nodes, self.shape.depth, self.host.numpy()
        if depth == 1:
            return [([token], [0]) for token in self.tokens(count)]
        lengths = results[:count].tolist()
        tokens, paths = results[nodes : nodes * (1 + 2 * depth)].reshape(2, nodes, depth)[:, :count].tolist()
        return [(t[:n], p[:n]) for t, p, n in zip(tokens, paths, lengths, strict=True)]

    @property
    def finite(self) -> NDArray[np.bool_] | None:
        return None if self.finite_rows is None else self.finite_rows.numpy()


class Runner:
    """Runs `model` over `cache`. The cache's last block takes the KV of padding rows; it belongs to no
    sequence."""

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
        fields = forward_fields(largest, len(self.windows), self.padding_slot)
        self._forward_uploads = Uploads(device, fields.size)
        self._sample_uploads = Uploads(device, sample_fields(SampleShape(ROWS[-1], DEPTHS[-1])).size)
        self._hidden = torch.zeros(ROWS[-1], spec.hidden_size, dtype=model.dtype, device=device)
        self._states = self._hidden
        """The hidden states of the last forward pass: a new tensor for more than ROWS[-1] rows."""
        self._results = torch.zeros(RESULTS + PLACES, dtype=torch.int32, device=device)
        self._logits_memory = torch.empty(0, 0, dtype=torch.float32, device=device)
        self._logits: dict[SampleShape, Tensor] = {}
        """The memory for the logits of each shape. Shapes share `_logits_memory`; shapes that were first used
        before it grew keep the earlier memory."""
        self._sampled: SampleShape | None = None
        self._verified = SampleShape(0, 0)
        self._last_forward: tuple[Hashable, Callable[[], None]]
        self._last_sample: tuple[Hashable, Callable[[], object]]

    @property
    def places(self) -> Tensor:
        """Draft tokens on the device [PLACES]. In a pass's input, the token -1 - p stands for the draft token
        at place p."""
        return self._results[RESULTS:]

    @property
    def walked(self) -> tuple[Tensor, Tensor]:
        """The lengths [trees] and the tokens [trees, depth] of the paths that the last sampling pass
        accepted, on the device. The number of trees is padded."""
        nodes, depth = self._verified.nodes, self._verified.depth
        return self._results[:nodes], self._results[nodes : nodes * (1 + depth)].view(nodes, depth)

    @property
    def tables(self) -> Tensor:
        """The block tables [sequences, width] of the last pass, on the device."""
        return self._tables

    @property
    def firsts(self) -> int:
        """Number of passes that took longer because kernels were compiled or a graph was captured."""
        return self.graphs.firsts

    @torch.inference_mode()
    def warm_up(self, forwards: Iterable[ForwardShape], samples: Iterable[SampleShape]) -> None:
        """Compile and capture passes of these shapes, with padding as input. Waits for the device."""
        for shape in forwards:
            fields = self._forward_fields(shape)
            self._forward_uploads.upload(fields, padding(fields))
            prepare = self.graphs.prepare if shape.captured else self.graphs.direct
            prepare(*self._captured_forward(shape))
        for sampled in samples:
            fields = sample_fields(sampled)
            self._sample_uploads.upload(fields, padding(fields))
            self.graphs.prepare(*self._captured_sample(sampled))
        self.fetch(self._hidden[:1]).wait()

    def forward(self, layout: Layout, sources: Mapping[int, int] | None = None) -> Tensor:
        """Launch a forward pass; return the hidden states [rows, hidden], which the next pass overwrites.
        `sources[i]`: the tree of the previous sampling pass whose token is the input of span i, which has one
        row."""
        return self.launch(self.prepare(layout, sources))

    def prepare(self, layout: Layout, sources: Mapping[int, int] | None = None) -> PreparedPass:
        """Prepare a forward pass, and launch the upload of its block tables."""
        spec, rows = self.model.spec, len(layout.tokens)
        plan = plan_attention(
            layout, self.cache.block_size, spec.num_heads // spec.num_kv_heads, spec.num_kv_heads,
            self.windows, self._multiprocessors, MAX_PARTIALS,
        )  # fmt: skip
        self._upload_tables(plan.tables)
        arrays = forward_arrays(layout, plan, self.windows, sources or {})
        return PreparedPass(forward_shape(rows, plan), arrays, plan.tables, rows)

    def launch(self, prepared: PreparedPass) -> Tensor:
        """Launch the last prepared pass; return the hidden states as `forward` does."""
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
        self._last_forward = self._captured_forward(shape)
        run = self.graphs.run if shape.captured else self.graphs.direct
        run(*self._last_forward)
        return self._hidden[:rows]

    def sample(self, nodes: Nodes) -> Tensor:
        """Launch the sampling of tokens at `nodes`, from the last forward pass; return the nodes' logits
        [nodes, vocabulary], which the next sampling pass overwrites. The KV of accepted nodes is moved to the
        slots after the root. Raises ValueError for more nodes than the results have memory for."""
        shape = self._sampled = self._verified = nodes.shape
        if shape.results > RESULTS:
            raise ValueError(f"a step cannot verify {shape.nodes} nodes with paths of {shape.depth} tokens")
        return self._launch_sample(shape, sample_arrays(nodes, shape))[: len(nodes.rows)]

    def choose_likeliest(self, rows: Int32s, after: Tensor | None = None) -> Tensor:
        """Launch the choice of the likeliest token at each of `rows` of the last forward pass, or at
        rows[i] + after[i]. The next pass may take the tokens on the device (`sources`). Returns the tokens
        and the bits of their float32 probabilities [2, nodes], nodes padded; the next choice overwrites
        them."""
        shape = SampleShape(bucket(len(rows)) or len(rows), 1, scored=True)
        self._launch_sample(shape, {"rows": rows, "draws": greedy_draws(len(rows))}, after)
        return self._results[: shape.results].view(2, shape.nodes)

    def extend(self, views: Mapping[str, Tensor], shape: ForwardShape) -> Tensor:
        """Do a pass over one token per row, at most ROWS[-1] rows, and choose the next token after each. This
        is a part of captured work. Its inputs are `views` of a buffer on the device, with the `draws` of the
        rows. Returns the results of `choose_likeliest`."""
        hidden = self._hidden[: shape.rows]
        self._forward(views, shape, hidden)
        chosen = SampleShape(shape.rows, 1, scored=True)
        self._choose(self.model.logits(hidden), views["draws"], chosen)
        return self._results[: chosen.results].view(2, shape.rows)

    def _launch_sample(self, shape: SampleShape, arrays: Arrays, after: Tensor | None = None) -> Tensor:
        """Launch a sampling pass at the rows of `arrays`, or at row i of them plus after[i]; return the
        logits [nodes, vocabulary], nodes padded."""
        fields = sample_fields(shape)
        if shape.nodes > ROWS[-1] or self._states is not self._hidden:
            # Captured graphs read other buffers, at fixed addresses.
            uploads = Uploads(self.model.device, fields.size)
            uploads.upload(fields, arrays)
            return self._sample(fields.views(uploads.buffer), shape)
        self._sample_uploads.upload(fields, arrays)
        if after is not None:
            fields.views(self._sample_uploads.buffer)["rows"][: len(after)] += after
        self._last_sample = self._captured_sample(shape)
        self.graphs.run(*self._last_sample)
        return self._logits[shape]

    def fetch(self, rows: Tensor | None) -> Fetch:
        """Launch the copy of the last sampling pass's results to the host. With hidden states `rows`, also
        copy, for each row, whether it is finite."""
        shape, self._sampled = self._sampled, None
        host = to_host(self._results[: 0 if shape is None else shape.results])
        finite = None if rows is None else to_host(finite_rows(rows))
        return Fetch(shape, host, finite, self.mark())

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that occurs after all launched work, for the caller to wait for; None on the
        CPU."""
        self.waits += 1
        if self.model.device.type != "cuda":
            return None
        event = new_event()
        event.record()
        return event

    def replay(self) -> None:
        """Launch the last forward and sampling passes again, with the inputs that are still on the device.
        Only measurements use this."""
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
        """Do nothing: only a LeadingRunner has other processes to end."""

    def _forward_fields(self, shape: ForwardShape) -> BufferFields:
        return forward_fields(shape, len(self.windows), self.padding_slot)

    def _captured_forward(self, shape: ForwardShape) -> tuple[Hashable, Callable[[], None]]:
        """Return the forward pass of a shape, with inputs and outputs at fixed addresses."""
        fields, buffer = self._forward_fields(shape), self._forward_uploads.buffer
        hidden = self._hidden[: shape.rows]
        return shape, lambda: self._forward(fields.views(buffer), shape, hidden)

    def _captured_sample(self, shape: SampleShape) -> tuple[Hashable, Callable[[], object]]:
        """Return the sampling pass of a shape, with inputs and outputs at fixed addresses."""
        fields, buffer, logits = sample_fields(shape), self._sample_uploads.buffer, self._logits_of(shape)
        return shape, lambda: self._sample(fields.views(buffer), shape, logits)

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

    def _logits_of(self, shape: SampleShape) -> Tensor:
        """Return the memory for the logits [nodes, vocabulary] of a shape. Every call for a shape returns the
        same memory, because captured passes write there. Shapes share the memory; a larger one is allocated
        for the first shape that does not fit and for all new shapes after it."""
        if shape not in self._logits:
            if len(self._logits_memory) < shape.nodes:
                self._logits_memory = self._results.new_empty(
                    shape.nodes, self.model.spec.vocab_size, dtype=torch.float32
                )
            self._logits[shape] = self._logits_memory[: shape.nodes]
        return self._logits[shape]

    def _sample(self, views: Mapping[str, Tensor], shape: SampleShape, out: Tensor | None = None) -> Tensor:
        """Choose tokens; return the logits, written to `out` if it is given."""
        hidden = self._states.index_select(0, views["rows"])
        logits = self.model.logits(hidden, out)
        nodes, depth, results = shape.nodes, shape.depth, self._results
        if depth == 1:
            self._choose(logits, views["draws"], shape)
            return logits
        chosen = torch.empty(nodes, dtype=torch.int32, device=results.device)
        self._operations.sampling.choose_tokens(logits, views["draws"], chosen)
        lengths = results[:nodes]
        tokens, paths = results[nodes : nodes * (1 + 2 * depth)].view(2, nodes, depth)
        firsts, slots = views["firsts"], views["slots"]
        drafted = self._operations.layers.gather_tokens(views["tokens"], results, views["sources"])
        self._operations.verify.walk_trees(chosen, drafted, views["parents"], firsts, tokens, paths, lengths)
        self._operations.verify.compact(self.cache.data, slots, firsts, paths, lengths)
        return logits

    def _choose(self, logits: Tensor, draws: Tensor, shape: SampleShape) -> None:
        """Write to the results the token that each row of `draws` chooses from `logits` [nodes, vocabulary]
        and, if the shape is `scored`, the probability of the likeliest token."""
        nodes, results = shape.nodes, self._results
        self._operations.sampling.choose_tokens(logits, draws, results[:nodes])
        if shape.scored:
            likeliest = logits.log_softmax(-1, torch.float32).amax(-1).exp()
            results[nodes : 2 * nodes].view(torch.float32).copy_(likeliest)

    def _upload_tables(self, tables: Int32s) -> None:
        """Copy block tables [sequences, width] to the device. Their width differs between steps, so they are
        copied into a table of full width after the upload."""
        field = BufferFields((Field("tables", tables.shape),))
        self._table_uploads.upload(field, {"tables": tables})
        view = field.views(self._table_uploads.buffer)["tables"]
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(view)


def finite_rows(hidden: Tensor) -> Tensor:
    """Return, for each row of `hidden` [rows, hidden], whether it is finite."""
    return hidden.sum(-1, dtype=torch.float32).isfinite()


@lru_cache
def greedy_draws(count: int) -> Int32s:
    """Return the draws of `count` greedy tokens."""
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
