"""Chains of draft tokens on a device: each level's tokens are fed to the next pass without the host.

    host     read, plan | launch 1 | launch 2 | launch 3 | wait                       | tokens
    device              ███ read ███ choose ███ pass 1 ███ choose ███ pass 2 ███ choose

All passes after the reading one have one row a chain and one shape. Their attention is planned once, for the
slots of the whole chains; what a pass sees of them is said by its limits. A chain that has ended computes a
padding row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from streamserve.engine.plan import Span
from streamserve.execution.cuda.passes import PreparedPass
from streamserve.execution.cuda.runner import Runner, finite_rows, to_host
from streamserve.execution.drafters.chains import Chains
from streamserve.execution.layout import Ints, lay_out


@dataclass(frozen=True)
class DeviceChains:
    """Drafts chains (ChainDrafting) with the model of `runner`."""

    runner: Runner

    @torch.inference_mode()
    def draft(self, spans: Sequence[Span], lengths: Sequence[int]) -> Chains:
        """As ChainDrafting.draft: launches everything, and waits once."""
        runner = self.runner
        layout = lay_out(spans, runner.cache.block_size)
        hidden = runner.forward(layout)
        finite = to_host(finite_rows(hidden))
        rows = np.array([part.root for part in layout.parts], np.int32)
        chosen = [runner.choose_likeliest(rows).clone()]
        rows = np.arange(len(spans), dtype=np.int32)
        for level in self._passes(spans, np.array(lengths)):
            runner.launch(level)
            chosen.append(runner.choose_likeliest(rows, again=len(chosen) > 1).clone())
        results, done = to_host(torch.stack(chosen)), runner.mark()
        if done is not None:
            done.synchronize()
        found = results.numpy()[:, :, : len(spans)]
        return Chains(found[:, 0], found[:, 1].view(np.float32), finite.numpy())

    def _passes(self, spans: Sequence[Span], lengths: Ints) -> Iterator[PreparedPass]:
        """Yield the passes of the tokens that are drafted: of all but each chain's last."""
        if lengths.max() == 1:
            return
        block_size, windows = self.runner.cache.block_size, self.runner.windows
        starts = np.array([span.start + len(span.tokens) for span in spans])
        ends = [
            Span(span.sequence, start + length - 2, [0], span.blocks)
            for span, start, length in zip(spans, starts.tolist(), lengths.tolist(), strict=True)
        ]
        layout = lay_out(ends, block_size)
        # Windows begin where the first pass's do.
        prepared = self.runner.prepare(replace(layout, positions=np.minimum(starts, layout.positions)))
        chains = np.arange(len(spans))
        for number in range(int(lengths.max()) - 1):
            fed = number < lengths - 1
            positions = np.where(fed, starts + number, 0)
            slots = prepared.tables[chains, positions // block_size] * block_size + positions % block_size
            arrays = dict(prepared.arrays) | {
                "sources": np.where(fed, chains, -1),
                "positions": positions,
                "slots": np.where(fed, slots, self.runner.padding_slot),
                "limits": np.where(fed, positions + 1, 0),
            }
            for index, window in enumerate(windows):
                first = 0 if window is None else np.maximum(positions - (window - 1), 0)
                arrays[f"firsts {index}"] = np.broadcast_to(first, len(spans))
            yield replace(prepared, arrays=arrays)
