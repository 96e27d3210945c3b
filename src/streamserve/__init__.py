"""streamserve: serve Llama-family models with stream pairs, token-tree speculation and arriving prompts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamserve.llm import LLM as LLM
    from streamserve.protocol.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` and `SamplingParams` on first use, so that a worker does not import what only a client needs."""
    if name == "LLM":
        from streamserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from streamserve.protocol.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
