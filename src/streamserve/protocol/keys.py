"""API keys as SHA-256 digests: the key itself is never stored, compared or printed."""

import hashlib
import hmac
import re
from collections.abc import Collection

PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_KEY = 1024


def digest(key: str) -> str:
    """Return `key` as "sha256:" and 64 hexadecimal digits. A digest in that form is returned unchanged.

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
    """Return whether `shown` is one of the keys, in time independent of which one it is, or none. A digest is
    not accepted as a key."""
    shown_digest = PREFIX + hashlib.sha256(shown.encode("utf-8", "surrogateescape")).hexdigest()
    return sum(hmac.compare_digest(shown_digest, known) for known in digests) > 0
