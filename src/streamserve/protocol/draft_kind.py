"""The kinds of drafters that `--draft` names."""

from enum import Enum


class DraftKind(Enum):
    """What makes draft tokens: nothing (NONE), n-gram lookup, the target's FIRST_LAYERS (self:K), a service
    (SERVICE: tcp://…), or a draft model (MODEL: its name, its folder or its GGUF file). AUTO becomes MODEL
    or NONE with the other settings."""

    AUTO = "auto"
    NONE = "none"
    NGRAM = "ngram"
    FIRST_LAYERS = "self"
    SERVICE = "service"
    MODEL = "model"


_WORDS = {kind.value: kind for kind in (DraftKind.AUTO, DraftKind.NONE, DraftKind.NGRAM)}
FIRST_LAYERS_PREFIX = "self:"
_PREFIXES = {FIRST_LAYERS_PREFIX: DraftKind.FIRST_LAYERS, "tcp://": DraftKind.SERVICE}


def draft_kind(draft: str) -> DraftKind:
    """Return the kind that a value of the setting `draft` names."""
    prefixed = (kind for prefix, kind in _PREFIXES.items() if draft.startswith(prefix))
    return _WORDS.get(draft) or next(prefixed, DraftKind.MODEL)
