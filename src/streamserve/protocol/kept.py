"""Outputs that workers keep for the next head, for requests that clients repeat with an idempotency key: how
such a request is recognized, and how much is kept.

    Submit.keep ──▶ worker ── its head dies, another one adopts it ── KeptOutputs ──▶ Fleet ◀── Open.keep
"""

from hashlib import blake2b
from typing import Annotated

import msgspec

from streamserve.protocol.sampling import SamplingParams

MAX_KEPT_OUTPUTS = 1024
"""Maximum number of requests whose outputs a worker keeps: the latest ones."""
MAX_KEPT_BYTES = 64 << 20
"""Maximum bytes, approximately, of all kept outputs in a worker's process."""
KEPT_SECONDS = 600.0
"""Seconds for which a head keeps the outputs of the head before: a client may be slow to repeat its
request."""
TOKEN_BYTES, LOGPROB_BYTES = 110, 90
"""Approximate bytes of a token in a process, and of each of its log-probabilities."""

Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


def digest_of(key: str, prompt: list[int], params: SamplingParams, cache_salt: str, adapter: str) -> bytes:
    """Return the digest of a request with an idempotency key: equal if and only if key, prompt, parameters,
    cache salt and adapter are equal. Return an empty digest if outputs are not kept: vectors and
    log-probabilities of prompts are computed again."""
    if not key or params.pooling is not None or params.prompt_logprobs is not None:
        return b""
    whole = msgspec.msgpack.encode((key, prompt, params, cache_salt, adapter))
    return blake2b(whole, digest_size=16).digest()
