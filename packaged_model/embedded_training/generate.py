"""Greedy generation for many prompts at once, with left padding and a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Llama
from .tokenizer import EOS, IM_END, PAD


def _pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Left-padded ids and which of them are real."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), PAD)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
    real = torch.arange(width) >= (width - torch.tensor([len(prompt) for prompt in prompts])).unsqueeze(1)
    return ids, real


@torch.inference_mode()
def greedy(model: Llama, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """The greedy reply to each prompt, without its end token."""
    ids, real = _pad(prompts)
    width = ids.shape[1]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    # Padding sees itself, because a row of attention with nothing in it would be undefined.
    mask = (torch.ones(width, width).tril().bool() & real.unsqueeze(1)) | torch.eye(width).bool()
    logits, cache = model.step(ids, None, mask.unsqueeze(1), positions)
    following, place = logits[:, -1].argmax(-1), positions[:, -1]
    replies: list[list[int]] = [[] for _ in prompts]
    alive = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(limit):
        alive &= (following != IM_END) & (following != EOS)
        if not alive.any():
            break
        for row in alive.nonzero().squeeze(1).tolist():
            replies[row].append(int(following[row]))
        real, place = torch.cat((real, alive.unsqueeze(1)), dim=1), place + 1
        seen = real.clone()
        seen[:, -1] = True
        logits, cache = model.step(following.unsqueeze(1), cache, seen[:, None, None, :], place.unsqueeze(1))
        following = logits[:, -1].argmax(-1)
    return replies
