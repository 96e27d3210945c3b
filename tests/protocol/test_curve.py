"""Addresses and key files of draft services are parsed and checked."""

import stat
from pathlib import Path

import pytest

from streamserve.protocol.curve import (
    KeyPair,
    parse_endpoint,
    parse_endpoints,
    read_clients,
    read_key_pair,
    write_key_pair,
)

KEY = "ab" * 32


def test_endpoints_may_carry_the_services_key() -> None:
    endpoint = parse_endpoint(f"tcp://{KEY}@drafts.example:7700")
    assert (endpoint.host, endpoint.port, endpoint.server_key) == (
        "drafts.example", 7700, bytes.fromhex(KEY),
    )  # fmt: skip
    assert endpoint.address == "tcp://drafts.example:7700"
    assert [one.port for one in parse_endpoints("tcp://a:1, tcp://b:2")] == [1, 2]


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://a", "udp://a:1", "tcp://a:99999", "tcp://short@a:1", "tcp://a:1,"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        parse_endpoints(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("0.0.0.0", False), ("10.0.0.1", False),
     ("drafts", False), ("*", False)],
)  # fmt: skip
def test_loopback_is_what_only_this_machine_reaches(text: str, loopback: bool) -> None:
    assert parse_endpoint(f"tcp://{text}:1").loopback is loopback


def test_a_key_file_is_for_its_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    path, pair = tmp_path / "key", KeyPair(b"p" * 32, b"s" * 32)
    write_key_pair(path, pair)
    assert read_key_pair(path) == pair
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_key_pair(path, pair)
    assert pair.secret.hex() not in repr(pair)


def test_a_bad_key_file_is_refused_without_quoting_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("public = 12\nsecret = verysecret\n")
    with pytest.raises(ValueError, match="not a key file") as caught:
        read_key_pair(path)
    assert "verysecret" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_key_pair(tmp_path / "missing")


def test_clients_have_names(tmp_path: Path) -> None:
    path = tmp_path / "clients"
    path.write_text(f"# allowed clients\n{KEY} web-1\n{'cd' * 32}\n")
    assert read_clients(path) == {bytes.fromhex(KEY): "web-1", bytes.fromhex("cd" * 32): "cdcdcdcd"}
    path.write_text("web-1\n")
    with pytest.raises(ValueError, match="entry 1"):
        read_clients(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no public key"):
        read_clients(path)
