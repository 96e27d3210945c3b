"""API keys as SHA-256 digests: what is kept, compared and printed is never the key itself."""

import hashlib
import hmac
import re
from collections.abc import Collection

PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_KEY = 1024


def digest(key: str) -> str:
    """`key` as "sha256:" and 64 hexadecimal digits. Such a digest stays as it is.

    Raises ValueError, which does not quote the key, if it is empty, longer than 1024 characters, or could not
    be sent in a header.
    """
    if key.startswith(PREFIX):
        if not _DIGEST.fullmatch(key):
            raise ValueError("a digest must be sha256: and 64 lower-case hexadecimal digits")
        return key
    if not 0 < len(key) <= _MAX_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("a key must have 1 to 1024 printable ASCII characters and no space")
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()


def matches(shown: str, digests: Collection[str]) -> bool:
    """Whether `shown` is one of the keys; takes as long whichever it is, or if it is none. A digest is not
    a key: showing one opens nothing."""
    found = PREFIX + hashlib.sha256(shown.encode("utf-8", "surrogateescape")).hexdigest()
    return sum([hmac.compare_digest(found, known) for known in digests]) > 0
