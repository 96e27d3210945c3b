"""Models on the native kernels, and their logits."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path as Folder

import torch

from streamserve.contracts.plan import Span
from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.model import NativeModel
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.loading.load import make_attention
from streamserve.execution.loading.weights import LinearMakers, load_model
from streamserve.execution.model.attention import AttentionBackend
from streamserve.execution.model.layout import lay_out
from tests.execution.variants import TEXT

BLOCKS = [11, 3, 5, 15, 0, 1, 9, 2, 14, 4, 6, 13, 12, 7, 8]


def model_of(
    folder: Folder, pool: ThreadPool, dtype: torch.dtype = torch.bfloat16
) -> tuple[NativeModel, AttentionBackend]:
    """Return a model on the kernels, and its attention over a KV cache whose slots hold NaN."""
    spec, checkpoint = open_checkpoint(folder)
    spec = spec.at_length(TEXT.shape[1])
    linear = partial(NativeLinear, pool, dtype=dtype)
    makers = LinearMakers(linear, partial(linear, paired=True), linear, partial(NativeLinear, pool))
    model = NativeModel.of(load_model(checkpoint, spec, dtype, makers), pool)
    cache = KVCache(spec, 16, 4, dtype)
    cache.data.fill_(torch.nan)
    return model, make_attention(cache, spec, pool)


@torch.inference_mode()
def forward(model: NativeModel, attention: AttentionBackend, spans: list[Span]) -> torch.Tensor:
    """Return the logits [rows, vocabulary] of a step."""
    layout = lay_out(spans, 4)
    attention.plan(layout)
    tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
    return model.logits(model.forward(tokens, positions, attention))


def logits_of(folder: Folder, chunks: Sequence[int], dtype: torch.dtype, pool: ThreadPool) -> torch.Tensor:
    """Return the kernels' logits [60, vocabulary] for TEXT, computed in chunks of these sizes."""
    model, attention = model_of(folder, pool, dtype)
    pieces, start = [], 0
    for size in chunks:
        text = TEXT[0, start : start + size].tolist()
        pieces.append(forward(model, attention, [Span(0, start, text, BLOCKS)]))
        start += size
    return torch.cat(pieces)
