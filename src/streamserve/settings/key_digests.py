"""The digests of the keys of a server, which are given as texts, as names of variables, or in files."""

from collections.abc import Mapping
from typing import Any

from streamserve.protocol import keys
from streamserve.protocol.files import read_file
from streamserve.settings.options import SettingsError


def digests(secret: str, values: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Return the digests of the keys given as `secret` and in its file; API keys with their tenants. No error
    message contains a key."""
    value, file = values.get(secret, ()), values.get(f"{secret}_file")
    texts = [value] if isinstance(value, str) else list(value)
    try:
        resolved = [_from_variable(secret, text, environ) for text in texts]
        if file is not None:
            lines = map(str.strip, read_file(file).decode("utf-8-sig").splitlines())
            file_keys = [line for line in lines if line and not line.startswith("#")]
            resolved += map(keys.entry, file_keys) if secret in _WITH_TENANTS else file_keys
            if not file_keys:
                raise SettingsError(f"{secret}_file = {file!r}: the file contains no key")
        entries = list(dict.fromkeys(_entry(secret, text) for text in resolved))
        keys.tenants(entries)  # raises if a key has two tenants
        return entries
    except (TypeError, AttributeError) as error:
        raise SettingsError(f"{secret}: must be strings") from error
    except OSError as error:
        raise SettingsError(f"{secret}_file = {file!r}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise error if isinstance(error, SettingsError) else SettingsError(f"{secret}: {error}") from None


_WITH_TENANTS = ("api_key",)
"""Keys that may have tenants. In a file, a tenant's name may follow any key; in a flag or a variable, it may
only follow a digest."""


def _entry(secret: str, text: str) -> str:
    """Return a key as its digest, with its tenant if it has one. Raises ValueError if the text is not a valid
    key."""
    named = secret in _WITH_TENANTS and text.startswith(keys.PREFIX) and " " in text
    return keys.entry(text) if named else keys.digest(text)


def _from_variable(secret: str, text: str, environ: Mapping[str, str]) -> str:
    """Return the value of the variable NAME for `env:NAME`; any other text is the key itself."""
    name = text.removeprefix("env:")
    if name == text:
        return text
    if name not in environ:
        raise SettingsError(f"{secret} = {text!r}: the environment has no such variable")
    return environ[name]
