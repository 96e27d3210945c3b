"""Certificates for HTTPS, read from files and checked before anything starts."""

import ssl

from streamserve.protocol.files import read_regular_file


class _Encrypted(Exception):
    """The private key has a password."""


def tls_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return the server's side of TLS (1.2 or later) with the `certificate` in a PEM file. Its private `key`
    is in another PEM file; None: in the same file.

    Raises ValueError, which names the setting and the fault of its file.
    """
    _check_block("ssl_certfile", certificate, "certificate")
    if key is None:
        _check_block("ssl_certfile", certificate, "private key", ": give it with ssl_keyfile")
    else:
        _check_block("ssl_keyfile", key, "private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except _Encrypted:
        raise ValueError(
            f"ssl_keyfile = {key or certificate!r}: the key has a password: remove it with "
            "openssl pkey -in FILE -out NEW"
        ) from None
    except ssl.SSLError as error:
        raise ValueError(_reason(certificate, key or certificate, error)) from None
    return context


def _refuse_password() -> str:
    raise _Encrypted


def _check_block(setting: str, file: str, name: str, advice: str = "") -> None:
    """Raise ValueError if `file` has no PEM block whose title ends with `name`."""
    try:
        text = read_regular_file(file).decode("utf-8", "replace")  # OpenSSL opens it again
    except OSError as error:
        raise ValueError(f"{setting} = {file!r}: cannot be read: {error.strerror}") from None
    if f"{name.upper()}-----" not in text:
        raise ValueError(f"{setting} = {file!r}: the file contains no {name} in PEM form{advice}")


def _reason(certificate: str, key: str, error: ssl.SSLError) -> str:
    """Return why a certificate and a key, which both exist, are not accepted."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile = {key!r}: this is not the key of the certificate in {certificate}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return f"ssl_certfile = {certificate!r}: cannot be used with the key in {key}: {reason}"
