"""OpenVINO GenAI: the continuous batching pipeline that its servers use."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("openvino-genai", "optimum-intel[openvino]")
UNWANTED = ("torchvision",)  # for another torch version; imported from the peer's environment
CONVERTS = ("", "int8", "int4", "int4:64")
GIB = 1 << 30


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return variables that disable telemetry and hub access."""
    return {"HF_HUB_OFFLINE": "1", "OPENVINO_TELEMETRY_DISABLED": "1"}


def convert(checkpoint: Path, to: Path, weights: str) -> None:
    """Convert with optimum: weights in 16 bits, or rounded to int8 or int4, perhaps in groups of a size."""
    kind, _, group = weights.partition(":")
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    settings = ["--model", str(checkpoint), "--task", "text-generation-with-past"]
    settings += ["--weight-format", kind or "fp16", *(["--group-size", group] if group else [])]
    subprocess.run([*command, *settings, str(to)], check=True)


class Engine:
    """The KV cache is in u8 (OpenVINO's default), bf16, or on AVX2 f32. Arithmetic is in bf16 where the
    processor supports it, by default. The converted model `draft`, if there is one, drafts `draft_tokens`
    tokens at a time."""

    def __init__(
        self, checkpoint: str, converted: str, threads: int, kv_bytes: int, options: dict[str, Any]
    ) -> None:
        import openvino as ov
        import openvino_genai as genai

        self.version = genai.__version__
        self._ov, self._genai = ov, genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = kv_bytes // GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = options.get("step", 512)
        plain = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": ov.Type.bf16,
            "KV_CACHE_PRECISION": getattr(ov.Type, options["kv"]),
        }
        properties = dict(plain)
        self._draft_tokens = options.get("draft_tokens", 0)
        if self._draft_tokens:
            properties["draft_model"] = genai.draft_model(options["draft"], "CPU")
        self._pipeline = genai.ContinuousBatchingPipeline(converted, scheduler, "CPU", properties)
        self.precision = f"{_arithmetic(plain)}, KV in {options['kv']}"

    def generate(self, prompts: list[list[int]], max_tokens: int, work: dict[str, Any]) -> list[list[int]]:
        """Return the token ids of all answers."""
        import numpy as np

        settings = self._genai.GenerationConfig()
        settings.max_new_tokens, settings.do_sample = max_tokens, False
        settings.ignore_eos = not work.get("ends")
        if self._draft_tokens:
            settings.num_assistant_tokens = self._draft_tokens
        inputs = [self._ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [settings] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    def close(self) -> None:
        """Do nothing: no resources are open."""


def log_probabilities(
    converted: str, threads: int, options: dict[str, Any], texts: list[list[int]]
) -> Iterator[Any]:
    """Yield for each text the log-probabilities after each of its tokens. The converted model runs in
    OpenVINO's runtime with the pipeline's precisions, since the pipeline itself returns no distributions."""
    import numpy as np
    import openvino as ov

    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": ov.Type.bf16,
        "KV_CACHE_PRECISION": getattr(ov.Type, options["kv"]),
    }
    compiled = ov.Core().compile_model(f"{converted}/openvino_model.xml", "CPU", properties)
    request = compiled.create_infer_request()
    for text in texts:
        request.reset_state()
        request.infer(
            {
                "input_ids": np.array([text], np.int64),
                "attention_mask": np.ones((1, len(text)), np.int64),
                "position_ids": np.arange(len(text), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits = request.get_tensor("logits").data[0].astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        yield shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _arithmetic(properties: dict[str, Any]) -> str:
    """Return the precision that the plugin actually uses: bf16 only where the processor has bf16
    instructions."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as opset

    x = opset.parameter([1, 64], np.float32)
    model = ov.Model([opset.matmul(x, opset.constant(np.ones((64, 64), np.float32)), False, True)], [x])
    compiled = ov.Core().compile_model(model, "CPU", properties)
    return f"arithmetic in {compiled.get_property('INFERENCE_PRECISION_HINT').get_type_name()}"
