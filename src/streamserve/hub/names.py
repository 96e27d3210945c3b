"""Names of models on the hub: `owner/repo`, or `owner/repo:Q4_K_M` for one model of a GGUF repository. A
revision may follow: `owner/repo@v1`, `owner/repo:Q4_K_M@v1`."""

import re
from dataclasses import dataclass

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(
    rf"({_PART}/{_PART})(?::([A-Za-z0-9][A-Za-z0-9._/-]*))?(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?"
)


@dataclass(frozen=True)
class HubName:
    """A model on the hub. `quantization` selects one of a repository's GGUF models, by the quantization at
    the end of its file name or by the whole file name. `revision` is a branch, a tag or a commit; None is the
    default branch."""

    repo: str
    quantization: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        quantization = f":{self.quantization}" if self.quantization else ""
        return self.repo + quantization + (f"@{self.revision}" if self.revision else "")


def parse_hub_name(text: str) -> HubName | None:
    """Return `text` parsed as a hub name; None if it is not one."""
    match = _NAME.fullmatch(text)
    return HubName(match[1], match[2], match[3]) if match else None
