"""llama.cpp through llama-cpp-python.

The package's class runs one text at a time, so this engine drives llama.cpp's batches itself, as its C++
server does, and keeps texts in the cache, so that a text that shares a prefix with one of them reuses it.
"""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("llama-cpp-python[server]", "gguf", "safetensors")
UNWANTED: tuple[str, ...] = ()
CONVERTS = ("", "Q8_0", "Q4_0", "Q4_K_M")
STEP = 2048
"""Tokens passed to llama.cpp at once."""


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return variables for pip: compile for this machine's processor."""
    return {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(len(cores))}


def convert(checkpoint: Path, to: Path, weights: str) -> None:
    """Convert to `model.gguf`, rounded to the type `weights` if given."""
    from benchmarks.engines.peers.adapters import gguf_file

    to.mkdir(parents=True, exist_ok=True)
    if not weights:
        gguf_file.write(checkpoint, to / "model.gguf")
        return
    import llama_cpp

    gguf_file.write(checkpoint, to / "16.gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weights}")
    names = (str(to / name).encode() for name in ("16.gguf", "model.gguf"))
    if llama_cpp.llama_model_quantize(*names, settings):
        raise RuntimeError(f"llama.cpp does not write {weights}")
    (to / "16.gguf").unlink()


class Engine:
    """Contexts over one model, one for each kind of work. KV is stored in f16, llama.cpp's default."""

    def __init__(
        self, checkpoint: str, converted: str, threads: int, kv_bytes: int, options: dict[str, Any]
    ) -> None:
        import llama_cpp

        self.version = llama_cpp.__version__
        llama_cpp.llama_backend_init()
        self._threads = threads
        self._contexts: dict[str, Context] = {}
        path = str(Path(converted) / "model.gguf").encode()
        self.model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {converted}/model.gguf")
        described = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self.model, described, len(described))
        self.precision = f"{described.value.decode()} weights, float16 KV"

    def generate(self, prompts: list[list[int]], max_tokens: int, work: dict[str, Any]) -> list[list[int]]:
        """Return the token ids of all answers."""
        if work["name"] not in self._contexts:
            self._contexts[work["name"]] = Context(self.model, self._threads, work)
        return self._contexts[work["name"]].generate(prompts, max_tokens)

    def close(self) -> None:
        """Do nothing: no resources are open."""


class Context:
    """Computes the streams of one kind of work, and records which tokens of each stream are in the cache."""

    def __init__(self, model: Any, threads: int, work: dict[str, Any]) -> None:
        import llama_cpp
        import numpy as np

        self._api, self._np = llama_cpp, np
        self._shared = bool(work["known"]) and work["streams"] > 1
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max = work["streams"]
        settings.n_ctx = work["streams"] * -(-work["longest"] // 256) * 256
        settings.n_batch = STEP
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = self._shared  # prefix copies are then free, but attention scans all slots
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {settings.n_ctx} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(STEP, 0, 1)
        self._held: list[list[int]] = [[] for _ in range(work["streams"])]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Return the token ids of all answers: prompts run in full batches, then each text grows by one token
        a step."""
        fed = [(i, token) for i, prompt in enumerate(prompts) for token in prompt[self._reuse(i, prompt) :]]
        first: dict[int, int] = {}
        for begin in range(0, len(fed), STEP):
            first |= self._decode(fed[begin : begin + STEP], [len(prompt) for prompt in prompts])
        answers = [[first[i]] for i in range(len(prompts))]
        for _ in range(max_tokens - 1):
            for i, token in self._decode([(i, answer[-1]) for i, answer in enumerate(answers)]).items():
                answers[i].append(token)
        return answers

    def logits(self, text: list[int]) -> Any:
        """Return the logits after each token of a text [tokens, vocabulary], computed without other texts."""
        batch = self._batch
        batch.n_tokens = len(text)
        for position, token in enumerate(text):
            batch.token[position], batch.pos[position] = token, position
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            batch.logits[position] = True
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        found = self._api.llama_get_logits(self._context)
        return self._np.ctypeslib.as_array(found, (len(text), self._vocabulary)).copy()

    def _reuse(self, sequence: int, prompt: list[int]) -> int:
        """Set up the sequence with the longest cached prefix of the prompt, excluding its last token; return
        the prefix's length."""
        common = _common(self._held[sequence], prompt)
        if self._shared:
            best = max(range(len(self._held)), key=lambda other: _common(self._held[other], prompt))
            if _common(self._held[best], prompt) > common:
                common = _common(self._held[best], prompt)
                self._api.llama_memory_seq_rm(self._memory, sequence, -1, -1)
                self._api.llama_memory_seq_cp(self._memory, best, sequence, 0, common)
        common = min(common, len(prompt) - 1)
        self._api.llama_memory_seq_rm(self._memory, sequence, common, -1)
        self._held[sequence] = prompt[:common]
        return common

    def _decode(self, fed: list[tuple[int, int]], lengths: list[int] | None = None) -> dict[int, int]:
        """Compute (sequence, token) pairs; return the likeliest next token of each sequence that has reached
        its length, or of all."""
        batch = self._batch
        batch.n_tokens = len(fed)
        sequences = []
        for position, (sequence, token) in enumerate(fed):
            held = self._held[sequence]
            batch.token[position], batch.pos[position] = token, len(held)
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, sequence
            held.append(token)
            needs_logits = lengths is None or len(held) == lengths[sequence]
            batch.logits[position] = needs_logits
            if needs_logits:
                sequences.append(sequence)
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if not sequences:
            return {}
        shape = (len(sequences), self._vocabulary)
        logits = self._np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape)
        return dict(zip(sequences, logits.argmax(axis=1).tolist(), strict=True))


def log_probabilities(
    converted: str, threads: int, options: dict[str, Any], texts: list[list[int]]
) -> Iterator[Any]:
    """Yield for each text the log-probabilities after each of its tokens, from the logits of a batch."""
    import numpy as np

    engine = Engine("", converted, threads, 0, options)
    work = {"name": "read", "known": [], "streams": 1, "longest": max(map(len, texts))}
    for text in texts:
        context = Context(engine.model, threads, work)
        yield _log_softmax(context.logits(text).astype(np.float64))


def _log_softmax(logits: Any) -> Any:
    import numpy as np

    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _common(held: list[int], prompt: list[int]) -> int:
    """Return the length of the common prefix."""
    if held == prompt[: len(held)]:
        return len(held)
    return next(i for i, (a, b) in enumerate(zip([*held, -1], [*prompt, -2])) if a != b)  # noqa: B905


def serve(
    checkpoint: Path, converted: Path, port: int, threads: int, kv_bytes: int, options: dict[str, Any]
) -> list[str]:
    """Return the arguments of the package's server, which answers one request after another."""
    settings = {
        "model": converted / "model.gguf",
        "port": port,
        "host": "127.0.0.1",
        "n_ctx": 4096,
        "n_threads": threads,
        "n_threads_batch": threads,
        "model_alias": "model",
        "interrupt_requests": False,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["-m", "llama_cpp.server", *flags]
