"""Verification gives each branch of a tree the logits of the same tokens as a plain chain, bit for bit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.loading.load import load, make_attention
from streamserve.execution.model.attention import AttentionBackend
from streamserve.execution.model.forward import Model
from streamserve.execution.model.layout import lay_out
from streamserve.protocol.config import Backend, ModelConfig
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale

VOCABULARY, BLOCK, NUM_BLOCKS = 320, 4, 1024
MAX_PROMPT, MAX_NODES = 40, 16


@dataclass
class Machine:
    """A model on the row-invariant kernels, with a KV cache and its free blocks."""

    model: Model
    attention: AttentionBackend
    free: list[int]

    def shuffle(self, rng: random.Random) -> None:
        """Free all blocks, in random order."""
        self.free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)

    def blocks(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // BLOCK))]

    def logits(self, spans: Sequence[Span]) -> list[Tensor]:
        """Return each span's logits [rows, vocabulary] from a single pass over all spans."""
        layout = lay_out(spans, BLOCK)
        self.attention.plan(layout)
        tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
        logits = self.model.logits(self.model.forward(tokens, positions, self.attention))
        return [
            logits[part.offset : part.offset + part.span.query_tokens - part.span.skip]
            for part in layout.parts
        ]


def make_machine(folder: Path, dtype: str, backend: Backend = "auto", quantized: bool = False) -> Machine:
    loaded = load(
        ModelConfig(path=str(folder), dtype=dtype, backend=backend, threads=2, num_blocks=8, max_model_len=64)
    )
    kernels = loaded.model_info.row_invariant
    assert kernels or backend == "reference", "without kernels there is nothing to promise"
    spec = loaded.model.spec
    cache = KVCache(spec, NUM_BLOCKS, BLOCK, loaded.model.dtype, quantized=quantized)
    return Machine(loaded.model, make_attention(cache, spec, loaded.pool), [])


def random_tree(rng: random.Random, root: int) -> TokenTree:
    """Return a random tree: deep, wide or in between. Siblings may have the same token."""
    size, reach = rng.randint(3, MAX_NODES), rng.choice((1, 3, MAX_NODES))
    parents = (-1, *(rng.randint(max(0, node - reach), node - 1) for node in range(1, size)))
    tokens = (root, *(rng.randrange(VOCABULARY) for _ in range(1, size)))
    return TokenTree(tokens, parents, (0.0,) * size, (1.0,) * size)


def leaves(tree: TokenTree) -> list[int]:
    return [node for node in range(len(tree)) if node not in tree.parents]


@pytest.mark.each_value
@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "fields", "quantized"),
    [
        ("llama", {}, False),
        ("mistral", {"sliding_window": 9}, False),
        ("mistral", {"sliding_window": 9}, True),
    ],
)
def test_each_branch_of_random_trees_has_the_logits_of_a_plain_chain(
    tmp_path: Path,
    architecture: str,
    fields: dict[str, int],
    quantized: bool,
    dtype: str,
    scale: Scale,
    record: Callable[..., None],
) -> None:
    """Each branch of random trees has the logits of a plain chain. Trees of several sequences and a prompt
    chunk run in one pass; each branch is then replayed token by token."""
    machine = make_machine(make_checkpoint(tmp_path, architecture, **fields), dtype, quantized=quantized)
    rng, branches, wide = random.Random(scale.seed), 0, 0
    for _ in range(scale.pick(4, 50)):
        machine.shuffle(rng)
        prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, MAX_PROMPT))] for _ in range(3)]
        tables = [machine.blocks(len(prompt) + MAX_NODES) for prompt in prompts]
        for prompt, table in zip(prompts, tables, strict=True):
            if len(prompt) > 1:
                machine.logits([Span(0, 0, prompt[:-1], table)])
        trees = [random_tree(rng, prompt[-1]) for prompt in prompts]
        tree_spans = [
            Span(number, len(prompt) - 1, [prompt[-1]], table, tree, (0,))
            for number, (prompt, table, tree) in enumerate(zip(prompts, tables, trees, strict=True))
        ]
        chunk = Span(9, 0, [rng.randrange(VOCABULARY) for _ in range(20)], machine.blocks(20))
        verified = machine.logits([*tree_spans, chunk])
        for prompt, tree, logits in zip(prompts, trees, verified, strict=False):
            wide += any(tree.parents.count(node) > 1 for node in range(len(tree)))
            for leaf in leaves(tree):
                path = tree.path(leaf)
                expected = replay(machine, prompt, [tree.tokens[node] for node in path[1:]])
                assert torch.equal(logits[path].view(torch.int32), expected.view(torch.int32)), (tree, leaf)
                branches += 1
    assert wide > 0
    assert branches > 12
    record(branches=branches, trees_with_siblings=wide, seed=scale.seed)


@pytest.mark.each_value
@torch.inference_mode()
@pytest.mark.parametrize("fields", [{}, {"architecture": "mistral", "sliding_window": 9}])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_tree_read_level_by_level_has_the_logits_of_the_whole(
    tmp_path: Path, backend: Backend, fields: dict[str, Any], scale: Scale
) -> None:
    """A tree that is computed level by level, as a draft model does, has the logits of the whole tree in one
    pass. Each pass has the rows of one level; earlier levels have KV in their slots."""
    machine = make_machine(make_checkpoint(tmp_path, **fields), "float32", backend)
    rng, skipped = random.Random(scale.seed), 0
    for _ in range(scale.pick(4, 50)):
        machine.shuffle(rng)
        prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, MAX_PROMPT))] for _ in range(3)]
        trees = [by_levels(random_tree(rng, prompt[-1])) for prompt in prompts]
        tables = [machine.blocks(len(prompt) + MAX_NODES) for prompt in prompts]
        spans = [
            Span(number, 0, prompt, table, tree, (0,))
            for number, (prompt, table, tree) in enumerate(zip(prompts, tables, trees, strict=True))
        ]
        expected_logits = machine.logits(spans)
        machine.logits([replace(span, tree=None) for span in spans])
        for level in range(1, 1 + max(max(tree.depths()) for tree in trees)):
            passes = [(span, span.tree.depths()) for span in spans if level in span.tree.depths()]
            logits = machine.logits([
                replace(
                    span,
                    start=len(span.tokens) - 1,
                    tokens=span.tokens[-1:],
                    tree=span.tree.keep([node for node, depth in enumerate(depths) if depth <= level]),
                    skip=depths.index(level),
                )
                for span, depths in passes
            ])  # fmt: skip
            for (span, depths), rows in zip(passes, logits, strict=True):
                first = len(span.tokens) - 1 + depths.index(level)
                expected = expected_logits[span.sequence][first : first + depths.count(level)]
                skipped += depths.index(level)
                if backend == "auto":
                    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))
                else:
                    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
    assert skipped > 12


def by_levels(tree: TokenTree) -> TokenTree:
    """Return the tree with its nodes in order of depth."""
    depths = tree.depths()
    order = sorted(range(len(tree)), key=lambda node: (depths[node], node))
    index = {node: i for i, node in enumerate(order)}
    parents = (-1, *(index[tree.parents[node]] for node in order[1:]))
    return TokenTree(tuple(tree.tokens[node] for node in order), parents, tree.scores, tree.accept)


def replay(machine: Machine, prompt: list[int], draft_tokens: list[int]) -> Tensor:
    """Return the logits after the prompt and after each draft token, decoded one token per pass."""
    tokens = prompt + draft_tokens
    table = machine.blocks(len(tokens))
    if len(prompt) > 1:
        machine.logits([Span(0, 0, prompt[:-1], table)])
    rows = [
        machine.logits([Span(0, index, [tokens[index]], table)])[0]
        for index in range(len(prompt) - 1, len(tokens))
    ]
    machine.free += table
    return torch.cat(rows)
