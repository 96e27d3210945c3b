"""The parts of the training work at toy size: corpus rows, schedule, optimizer, generation, resuming."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from embedded_training import trainer as loop
from embedded_training.corpus import Rows, build
from embedded_training.generate import greedy
from embedded_training.induction import plant
from embedded_training.losses import DraftLoss, TargetLoss
from embedded_training.model import Llama, Shape
from embedded_training.optim import Optimisers, orthogonalise, schedule
from embedded_training.tokenizer import BOS, IM_END
from tokenizers import Tokenizer

from streamserve import embedded

TINY = Shape(hidden=64, layers=4, heads=1, kv_heads=1, ffn=64)


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    build(folder, embedded.path("embedded") / "tokenizer.json", "train", tokens=8_000, seed=5, workers=1)
    return folder


def test_corpus_marks_exactly_the_replies(corpus_folder: Path) -> None:
    rows = Rows(corpus_folder)
    tokenizer = Tokenizer.from_file(str(embedded.path("embedded") / "tokenizer.json"))
    assert (rows.ids[rows.starts] == BOS).all()
    chat = slice(int(rows.starts[0]), int(rows.starts[1]))
    ids, mask = np.asarray(rows.ids[chat]), np.asarray(rows.mask[chat])
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    replies = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]
    assert tokenizer.decode(ids[mask == 1].tolist(), skip_special_tokens=False) == "".join(
        f"{r}<|im_end|>" for r in replies
    )


def test_rows_start_with_chats_and_move_on(corpus_folder: Path) -> None:
    rows, chat, seen = Rows(corpus_folder), 0, set()
    for _ in range(20):
        ids, mask, chat = rows.take(4, 32, chat)
        assert ids.shape == mask.shape == (4, 33)
        assert (ids[:, 0] == BOS).all()
        seen.add(chat)
    assert len(seen) > 10


def test_schedule_ends_near_zero() -> None:
    assert schedule(0.0) < 0.02
    assert schedule(0.2) == 1.0
    assert schedule(0.999) < 0.01


def test_row_lengths_grow_to_the_trained_context() -> None:
    assert max(loop.row_length(0.9, step) for step in range(20)) == 2048
    assert loop.row_length(0.1, 0) < loop.row_length(0.9, 0)


def test_orthogonalise_evens_out_singular_values() -> None:
    # A slow reader may be unfinished at the end, so only most of them are checked.
    values = torch.linalg.svdvals(
        orthogonalise(torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(0)))
    )
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_losses_fall(corpus_folder: Path) -> None:
    torch.manual_seed(0)
    target, draft = Llama(TINY), Llama(Shape(hidden=64, layers=1, heads=1, kv_heads=1, ffn=64))
    ids, mask, _ = Rows(corpus_folder).take(4, 48, 0)
    for model, loss in ((target, TargetLoss(target)), (draft, DraftLoss(draft, target))):
        optimisers, values = Optimisers(model), []
        for _ in range(12):
            value, _ = loss(ids, mask, 0.0)
            value.backward()
            optimisers.step(1.0)
            values.append(value.item())
        assert values[-1] < values[0]


def test_greedy_in_a_batch_is_greedy_alone() -> None:
    torch.manual_seed(1)
    model = Llama(TINY)
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.2)
    prompts = [[1, 5, 9], [1, 7, 7, 20, 400, 8], [1, 3000]]
    together = greedy(model, prompts, 6)
    for prompt, reply in zip(prompts, together, strict=True):
        ids = list(prompt)
        for token in reply:
            with torch.inference_mode():
                assert int(model.head(model(torch.tensor([ids]))[-1])[0, -1].argmax()) == token
            ids.append(token)
        assert len(reply) == 6 or IM_END not in reply


def test_training_resumes(corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TOKENS_PER_STEP", 2048)
    rows, path = Rows(corpus_folder), tmp_path / "target.pt"

    def trainer(minutes: float) -> loop.Trainer:
        model = Llama(TINY)
        return loop.Trainer(model, Optimisers(model), rows, path, minutes)

    first = trainer(0.001)
    assert first.run(TargetLoss(first.model))
    again = trainer(first.progress.seconds / 60 + 0.005)
    assert again.progress.tokens == first.progress.tokens > 0
    assert again.run(TargetLoss(again.model))
    assert again.progress.steps > first.progress.steps


def test_planted_circuit_finds_what_followed(corpus_folder: Path) -> None:
    torch.manual_seed(2)
    shape = Shape(hidden=128, layers=2, heads=2, kv_heads=2, ffn=64)
    model, ids = Llama(shape), Rows(corpus_folder).take(16, 128, 0)[0]
    known = ids.unique()
    run = known[torch.randint(len(known), (4, 24))]
    twice = torch.cat((torch.ones(4, 1, dtype=torch.long), run, run), 1)

    def rank() -> float:
        with torch.inference_mode():
            logits = model.head(model(twice)[-1])[:, 25:-1]
        right = logits.gather(-1, twice[:, 26:, None])
        return (logits > right).sum(-1).float().median().item()

    before = rank()
    plant(model, ids)
    assert before > 300
    assert rank() < 30
