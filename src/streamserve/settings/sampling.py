"""The sampling values that a checkpoint recommends, for requests that do not set them."""

import json
from pathlib import Path
from typing import Any

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import MAX_VOCABULARY, SamplingParams, check_sampling

RECOMMENDED = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
"""Fields of a checkpoint's generation_config.json that become defaults of requests."""


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """Return the sampling values that the checkpoint recommends. If it says that `do_sample` is false, the
    temperature is 0.

    Raises CheckpointError if they cannot be read, or are invalid for every request.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_bytes())
        recommended = {
            name: kind(values[name]) for name, kind in RECOMMENDED.items() if values.get(name) is not None
        }
        if values.get("do_sample") is False:
            recommended["temperature"] = 0.0
        check_sampling(SamplingParams(**recommended), MAX_VOCABULARY)
        return recommended
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
