"""streamserve: serve Llama-family models with stream pairs, token-tree speculation and arriving prompts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamserve.llm import LLM as LLM
    from streamserve.protocol.grammar import Grammar as Grammar
    from streamserve.protocol.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM`, `Grammar` and `SamplingParams` on first use: a worker does not import what clients need."""
    if name == "LLM":
        from streamserve.llm import LLM

        return LLM
    if name == "Grammar":
        from streamserve.protocol.grammar import Grammar

        return Grammar
    if name == "SamplingParams":
        from streamserve.protocol.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
