"""streamserve: serve Llama-family models with stream pairs, token-tree speculation and prompt streams."""

from importlib import import_module
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
_PLACES = {
    "LLM": "llm.llm:LLM",
    "AsyncLLM": "llm.async_llm:AsyncLLM",
    "CompletionOutput": "llm.outputs:CompletionOutput",
    "Grammar": "protocol.grammar:Grammar",
    "Logprob": "llm.outputs:Logprob",
    "LoRARequest": "llm.prompts:LoRARequest",
    "RequestOutput": "llm.outputs:RequestOutput",
    "RequestOutputKind": "llm.params:RequestOutputKind",
    "SamplingParams": "llm.params:ScriptParams",
    "Slo": "protocol.sampling:Slo",
    "StructuredOutputsParams": "llm.params:StructuredOutputsParams",
    "TextPrompt": "llm.prompts:TextPrompt",
    "TokensPrompt": "llm.prompts:TokensPrompt",
}


def __getattr__(name: str) -> Any:
    """Import the exported names on first use: a worker does not import modules that only clients need."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)
