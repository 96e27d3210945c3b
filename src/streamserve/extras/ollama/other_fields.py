"""Known fields and options, of Ollama's API and of other routes, that the routes of Ollama's API do not
obey."""

import msgspec

from streamserve.api.http.ignored_fields import OtherFields, Values
from streamserve.api.openai.other_fields import (
    REFUSED,
    REFUSED_IN_CHATS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_IN_CHATS,
    obeyed_elsewhere,
    without,
)
from streamserve.extras.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions

OPTION_NAMES = {
    "max_completion_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    **{
        name: name
        for name in (
            "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
        )
    },
}  # fmt: skip
"""Maps fields of a chat request to the options of Ollama's API that set them."""

NAMES = {
    **{field: f"options.{option}" for field, option in OPTION_NAMES.items()},
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "response_format": "format",
}
"""Names of Ollama's API for fields of a chat request."""

OTHER_OPTIONS = OtherFields(
    refused={
        "mirostat": (0,),
        "penalize_newline": (True,),
        "repeat_last_n": (-1,),
        "tfs_z": (1,),
        "typical_p": (1,),
    },
    without_effect={
        "embedding_only": (False,),
        "f16_kv": (),
        "logits_all": (False,),
        "low_vram": (False,),
        "main_gpu": (),
        "mirostat_eta": (),
        "mirostat_tau": (),
        "num_batch": (),
        "num_ctx": (),
        "num_gpu": (),
        "num_keep": (),
        "num_thread": (),
        "numa": (False,),
        "use_mlock": (False,),
        "use_mmap": (),
        "vocab_only": (False,),
    },
)
"""Options that are not obeyed. `repeat_penalty` always concerns all tokens of prompt and output, as with a
repeat_last_n of -1."""

_RECORDS = ("user", "safety_identifier", "prompt_cache_key", "metadata")
"""Fields for the caller's own records, which no route obeys."""
_INSTEAD = {
    **NAMES,
    "enable_thinking": "think",
    **{name: f"options.{name}" for name in OllamaOptions.__struct_fields__},
}


def _others(kind: type[msgspec.Struct], refused: Values, instead: dict[str, str]) -> OtherFields:
    known = kind.__struct_fields__
    without_effect = {**WITHOUT_EFFECT, **WITHOUT_EFFECT_IN_CHATS, **dict.fromkeys(_RECORDS, ())}
    elsewhere = without({**obeyed_elsewhere(kind), **REFUSED, **REFUSED_IN_CHATS}, *_RECORDS)
    options: Values = dict.fromkeys(OllamaOptions.__struct_fields__, ())
    return OtherFields(
        refused={**elsewhere, **options, **refused},
        without_effect=without(without_effect, *known, *refused, *elsewhere),
        instead={**_INSTEAD, **instead},
    )


OTHER_IN_OLLAMA_CHATS = _others(OllamaChatRequest, {"images": ([],), "template": ("",)}, {})
OTHER_IN_GENERATE = _others(
    OllamaGenerateRequest,
    {
        "context": ([],),
        "height": (0,),
        "images": ([],),
        "steps": (0,),
        "suffix": ("",),
        "template": ("",),
        "width": (0,),
    },
    {
        "context": "/api/chat with messages",
        "messages": "/api/chat",
        "suffix": "raw, with the model's tokens for filling in the middle in the prompt",
        "template": "raw, with the whole prompt",
        "tools": "/api/chat",
    },
)
_IN_POOLING: Values = {"keep_alive": (), "options": ({},)}
OTHER_IN_EMBED = OtherFields(refused={"prompt": ()}, without_effect=_IN_POOLING, instead={"prompt": "input"})
OTHER_IN_EMBEDDINGS = OtherFields(
    refused={"input": ()}, without_effect=_IN_POOLING, instead={"input": "prompt, or /api/embed"}
)
OTHER_IN_SHOW = OtherFields(
    refused={"system": ("",), "template": ("",)}, without_effect={"options": ({},), "verbose": (False,)}
)
