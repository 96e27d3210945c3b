"""The training text on disk: token ids, which of them are replies, and where chats start."""

from __future__ import annotations

import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from embedded_data import Split, sample
from tokenizers import Tokenizer

from .tokenizer import IM_END, IM_START, render

CHATS_PER_PIECE = 10_000
Piece = tuple[np.ndarray, np.ndarray, np.ndarray]


def _reply_mask(ids: np.ndarray, roles: list[str], header: int) -> np.ndarray:
    """One for every token of a reply up to and with its ``<|im_end|>``."""
    mask = np.zeros(len(ids), np.uint8)
    opens, closes = np.flatnonzero(ids == IM_START), np.flatnonzero(ids == IM_END)
    for role, opened, closed in zip(roles, opens, closes, strict=True):
        if role == "assistant":
            mask[opened + header : closed + 1] = 1
    return mask


def piece(tokenizer_path: str, split: Split, seed: int, chats: int) -> Piece:
    """The ids, reply marks and chat starts of ``chats`` chats drawn with ``seed``."""
    tokenizer, rng = Tokenizer.from_file(tokenizer_path), random.Random(seed)
    drawn = [sample(rng, split).messages for _ in range(chats)]
    header = len(tokenizer.encode("<|im_start|>assistant\n").ids)
    encoded = tokenizer.encode_batch([render(messages) for messages in drawn])
    ids = [np.asarray(one.ids, np.uint16) for one in encoded]
    masks = [
        _reply_mask(one, [m["role"] for m in messages], header)
        for one, messages in zip(ids, drawn, strict=True)
    ]
    starts = np.cumsum([0] + [len(one) for one in ids[:-1]])
    return np.concatenate(ids), np.concatenate(masks), starts


def build(folder: Path, tokenizer_path: Path, split: Split, tokens: int, seed: int, workers: int = 2) -> None:
    """Write ``tokens`` tokens or a few more into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    starts: list[np.ndarray] = []
    done, number = 0, 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chats = min(CHATS_PER_PIECE, max(200, tokens // 400))
    with (
        ProcessPoolExecutor(workers) as pool,
        (folder / "ids.bin").open("wb") as ids_file,
        (folder / "mask.bin").open("wb") as mask_file,
    ):
        while done < tokens:
            jobs = [
                pool.submit(piece, str(tokenizer_path), split, seed * 100_003 + number + i, chats)
                for i in range(workers)
            ]
            number += workers
            for job in jobs:
                ids, mask, begun = job.result()
                ids.tofile(ids_file)
                mask.tofile(mask_file)
                starts.append(begun + done)
                done += len(ids)
            print(f"corpus {split}: {done:,} of {tokens:,} tokens", flush=True)
    np.save(folder / "starts.npy", np.concatenate(starts))


class Rows:
    """Rows that begin at a chat's start; a chat that a row's end cuts off begins the next row again."""

    def __init__(self, folder: Path) -> None:
        self.ids = np.memmap(folder / "ids.bin", np.uint16, "r")
        self.mask = np.memmap(folder / "mask.bin", np.uint8, "r")
        self.starts = np.load(folder / "starts.npy")

    def take(self, rows: int, length: int, chat: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Ids and reply marks of shape [rows, length + 1] from the given chat on, and the next chat."""
        ids = np.empty((rows, length + 1), np.int64)
        mask = np.empty((rows, length + 1), np.uint8)
        for row in range(rows):
            at = int(self.starts[chat])
            if at + length + 1 > len(self.ids):
                chat, at = 0, 0
            ids[row], mask[row] = self.ids[at : at + length + 1], self.mask[at : at + length + 1]
            # A chat longer than the row is not begun again: that would never move on.
            chat = max(int(np.searchsorted(self.starts, at + length + 1, "right")) - 1, chat + 1)
            chat = chat if chat < len(self.starts) else 0
        return torch.from_numpy(ids), torch.from_numpy(mask), chat
