"""streamserve itself, through the public library and server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES: tuple[str, ...] = ()
UNWANTED: tuple[str, ...] = ()
CONVERTS: tuple[str, ...] = ()
STOPPED = 3600.0
"""Seconds that a worker may be silent. Workers are stopped while other engines are measured."""


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return no variables: the defaults apply."""
    return {}


class Engine:
    """Runs prompts with the library."""

    def __init__(
        self, checkpoint: str, converted: str, threads: int, kv_bytes: int, options: dict[str, Any]
    ) -> None:
        from streamserve import LLM, SamplingParams, __version__

        self.version = __version__
        self._params = SamplingParams
        self._llm = LLM(checkpoint, threads=threads, kv_cache_bytes=kv_bytes, stuck_after=STOPPED, **options)
        self.precision = f"{self._llm.model.precision} weights, float32 sums"

    def generate(self, prompts: list[list[int]], max_tokens: int, work: dict[str, Any]) -> list[list[int]]:
        """Return the token ids of all answers."""
        params = self._params(temperature=0, max_tokens=max_tokens, ignore_eos=not work.get("ends"))
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def close(self) -> None:
        """Stop the worker."""
        self._llm.close()


def serve(
    checkpoint: Path, converted: Path, port: int, threads: int, kv_bytes: int, options: dict[str, Any]
) -> list[str]:
    """Return the arguments of `streamserve serve`."""
    settings = {
        "port": port,
        "threads": threads,
        "kv-cache-bytes": kv_bytes,
        "served-model-name": "model",
        "stuck-after": STOPPED,
        **options,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["-m", "streamserve", "serve", str(checkpoint), *flags]
