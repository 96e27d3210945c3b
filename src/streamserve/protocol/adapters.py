"""LoRA adapters as processes name them: by their content. A name in the API belongs to one adapter at a time,
but blocks, transfers and requests carry the hash of its files."""

from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec

from streamserve.protocol.errors import CheckpointError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHT_BYTES = 16 << 30
"""Maximum size of an adapter's weights, before the limits of a server are known."""

MAX_NAME = 256
"""Maximum length of an adapter's name, in characters."""

Fingerprint = Annotated[str, msgspec.Meta(max_length=64)]
"""The hash of an adapter's files; empty: the base model."""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: its name in the API, its folder in PEFT's layout, and the hash of its files."""

    name: str
    path: str
    fingerprint: Fingerprint


def open_adapter(name: str, path: str) -> Adapter:
    """Return the adapter in the folder `path`, whose files are read to hash them. Raises CheckpointError if
    they are missing or too large."""
    folder = Path(path).expanduser().absolute()
    return Adapter(
        name, str(folder), fingerprint_of(*(_checked(folder / file, limit) for file, limit in _FILES))
    )


_FILES = ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, MAX_WEIGHT_BYTES))
_PIECE = 1 << 20


def fingerprint_of(config: Path, weights: Path) -> str:
    """Return the hash of an adapter's two files. Raises CheckpointError if one cannot be read."""
    digest = blake2b(digest_size=16)
    for path in (config, weights):
        content = blake2b(digest_size=16)
        try:
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    content.update(piece)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        digest.update(content.digest())
    return digest.hexdigest()


def read_files(adapter_path: str, max_weight_bytes: int) -> tuple[bytes, bytes, str]:
    """Return the content of an adapter's configuration and weights, and its hash. Raises CheckpointError
    where a file is missing or too large."""
    folder, digest, contents = Path(adapter_path), blake2b(digest_size=16), []
    for file, limit in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, max_weight_bytes)):
        path = _checked(folder / file, limit)
        try:
            with path.open("rb") as opened:
                content = opened.read(limit + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if len(content) > limit:
            raise CheckpointError(f"{path}: has more than {limit} bytes")
        contents.append(content)
        digest.update(blake2b(content, digest_size=16).digest())
    config, weights = contents
    return config, weights, digest.hexdigest()


def _checked(path: Path, limit: int) -> Path:
    """Return `path`. Raises CheckpointError unless it is a file of at most `limit` bytes."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: there is no such file: an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, "
            "as PEFT saves it"
        )
    size = path.stat().st_size
    if size > limit:
        raise CheckpointError(f"{path}: has {size} bytes, but at most {limit} are read (max_lora_bytes)")
    return path


def check_name(name: str, taken: frozenset[str]) -> str:
    """Return why an adapter cannot have a name; empty if it can. `taken`: names of models and adapters."""
    if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
        return f"a name has 1 to {MAX_NAME} printable characters, without spaces around it: {name!r:.80}"
    return f"the name {name!r} is in use" if name in taken else ""
