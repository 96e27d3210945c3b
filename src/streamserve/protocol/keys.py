"""API keys as SHA-256 digests: the key itself is never stored, compared or printed. An entry of a list of
keys is a digest, optionally followed by the name of the key's tenant."""

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable

PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_KEY = 1024
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


def digest(key: str) -> str:
    """Return `key` as "sha256:" and 64 hexadecimal digits. A digest in this form is returned unchanged.

    Raises ValueError, which does not quote the key, if the key is empty, longer than 1024 characters, or
    could not be sent in a header.
    """
    if key.startswith(PREFIX):
        if not _DIGEST.fullmatch(key):
            raise ValueError("a digest must be sha256: and 64 lower-case hexadecimal digits")
        return key
    if not 0 < len(key) <= _MAX_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("a key must have 1 to 1024 printable ASCII characters and no space")
    return PREFIX + hashlib.sha256(key.encode()).hexdigest()


def entry(text: str) -> str:
    """Return `KEY` or `KEY TENANT`, a line of a key file, with the digest in place of the key.

    Raises ValueError for an invalid key, as `digest` does, or an invalid name of a tenant. The message quotes
    neither.
    """
    key, *tenant = text.split(maxsplit=1) or [""]
    if tenant and not _TENANT.fullmatch(tenant[0]):
        raise ValueError(
            "a tenant must have 1 to 32 letters, digits and ._-, and begin with a letter or digit"
        )
    return " ".join([digest(key), *tenant])


def tenants(entries: Iterable[str]) -> dict[str, str]:
    """Return the tenant of each key by the key's digest. A key without a tenant's name is a separate tenant,
    named by its digest. Raises ValueError if a key has two tenants."""
    found: dict[str, str] = {}
    for each in entries:
        key, _, name = each.partition(" ")
        if found.setdefault(key, name or key) != (name or key):
            raise ValueError("a key has two tenants")
    return found


def matches(shown: str, digests: Collection[str]) -> bool:
    """Return whether `shown` is one of the keys. The comparison takes the same time for every `shown`, so
    that time reveals nothing about the keys. A digest is not accepted as a key."""
    shown_digest = PREFIX + hashlib.sha256(shown.encode("utf-8", "surrogateescape")).hexdigest()
    return sum(hmac.compare_digest(shown_digest, known) for known in digests) > 0
