"""streamserve: serve Llama-family models with stream pairs, token-tree speculation and prompt streams."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamserve.llm.llm import LLM as LLM
    from streamserve.protocol.grammar import Grammar as Grammar
    from streamserve.protocol.sampling import SamplingParams as SamplingParams
    from streamserve.protocol.sampling import Slo as Slo

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "Slo", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the exported names on first use: a worker does not import modules that only clients need."""
    if name == "LLM":
        from streamserve.llm.llm import LLM

        return LLM
    if name == "Grammar":
        from streamserve.protocol.grammar import Grammar

        return Grammar
    if name == "SamplingParams":
        from streamserve.protocol.sampling import SamplingParams

        return SamplingParams
    if name == "Slo":
        from streamserve.protocol.sampling import Slo

        return Slo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
