"""Types of settings, and a function that describes a setting."""

from typing import Annotated, Literal

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Sequences = Annotated[int, Meta(ge=1, le=4096)]
Share = Annotated[float, Meta(ge=0, le=1)]
Workers = Annotated[int, Meta(ge=0, le=64)]
ToolFormatName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "granite", "phi4_mini", "qwen3_coder", "pythonic",
    "gemma", "functiongemma", "olmo3", "harmony",
]  # fmt: skip
ReasoningFormatName = Literal[
    "auto", "none", "qwen3", "deepseek_r1", "granite", "granite3_3", "mistral", "harmony"
]
LauncherName = Literal["local", "join", "ray"]


def about(text: str, ge: int | None = None, le: int | None = None) -> Meta:
    """Return msgspec metadata with the description of a setting, and with bounds if none of the types above
    has them."""
    return Meta(description=text, ge=ge, le=le)
