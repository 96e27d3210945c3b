"""Invalid certificates and keys are refused with the right message."""

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.system.tls import tls_context


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str], str]:
    """The names of the files: cert, key, other (another's key), locked (with a password), both, text."""
    certificate, other = (trustme.CA().issue_cert("localhost") for _ in range(2))
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    certificate.private_key_pem.write_to_path(tmp_path / "key")
    other.private_key_pem.write_to_path(tmp_path / "other")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both")
    private = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    (tmp_path / "locked").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    (tmp_path / "text").write_text("nothing\n")
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    return lambda name: str(tmp_path / name)


@pytest.mark.parametrize(("certificate", "key"), [("cert", "key"), ("both", None), ("both", "key")])
def test_a_pair_is_accepted(files: Callable[[str], str], certificate: str, key: str | None) -> None:
    context = tls_context(files(certificate), files(key) if key else None)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("missing", "key", "ssl_certfile = .*missing': cannot be read: No such file"),
        ("cert", "missing", "ssl_keyfile = .*missing': cannot be read: No such file"),
        ("text", "key", "ssl_certfile = .*text': the file contains no certificate in PEM form"),
        ("key", "cert", "ssl_certfile = .*key': the file contains no certificate"),
        ("cert", "cert", "ssl_keyfile = .*cert': the file contains no private key"),
        ("cert", None, "no private key in PEM form: give it with ssl_keyfile"),
        ("cert", "other", "ssl_keyfile = .*other': this is not the key of the certificate in .*cert"),
        ("cert", "locked", "the key has a password: remove it with openssl pkey"),
        ("broken", "key", "ssl_certfile = .*broken': cannot be used with the key in"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    files: Callable[[str], str], certificate: str, key: str | None, message: str
) -> None:
    settings = {"ssl_certfile": files(certificate), "ssl_keyfile": files(key) if key else None}
    with pytest.raises(SettingsError, match=message):
        resolve("embedded", settings, environ={})


def test_a_key_without_a_certificate_is_refused(files: Callable[[str], str]) -> None:
    with pytest.raises(SettingsError, match="has no effect without ssl_certfile"):
        resolve("embedded", {"ssl_keyfile": files("key")}, environ={})
