"""streamserve: serve Llama-family models with stream pairs, token-tree speculation and prompt streams."""

# ruff: noqa: F401  __getattr__ returns what it imports by name

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamserve.llm.async_llm import AsyncLLM as AsyncLLM
    from streamserve.llm.llm import LLM as LLM
    from streamserve.llm.outputs import CompletionOutput as CompletionOutput
    from streamserve.llm.outputs import Logprob as Logprob
    from streamserve.llm.outputs import RequestOutput as RequestOutput
    from streamserve.llm.params import RequestOutputKind as RequestOutputKind
    from streamserve.llm.params import ScriptParams as SamplingParams
    from streamserve.llm.params import StructuredOutputsParams as StructuredOutputsParams
    from streamserve.llm.prompts import LoRARequest as LoRARequest
    from streamserve.llm.prompts import TextPrompt as TextPrompt
    from streamserve.llm.prompts import TokensPrompt as TokensPrompt
    from streamserve.protocol.grammar import Grammar as Grammar
    from streamserve.protocol.sampling import Slo as Slo

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Grammar",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Slo",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the exported names on first use: a worker does not import modules that only clients need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    match name:
        case "LLM":
            from streamserve.llm.llm import LLM
        case "AsyncLLM":
            from streamserve.llm.async_llm import AsyncLLM
        case "CompletionOutput" | "Logprob" | "RequestOutput":
            from streamserve.llm.outputs import CompletionOutput, Logprob, RequestOutput
        case "RequestOutputKind" | "SamplingParams" | "StructuredOutputsParams":
            from streamserve.llm.params import RequestOutputKind, StructuredOutputsParams
            from streamserve.llm.params import ScriptParams as SamplingParams
        case "LoRARequest" | "TextPrompt" | "TokensPrompt":
            from streamserve.llm.prompts import LoRARequest, TextPrompt, TokensPrompt
        case "Grammar":
            from streamserve.protocol.grammar import Grammar
        case "Slo":
            from streamserve.protocol.sampling import Slo
    return locals()[name]
