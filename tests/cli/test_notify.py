"""A real server notifies systemd over a socket when it is ready and when it ends."""

import logging
import signal
import socket
from pathlib import Path

import pytest

from streamserve.cli.notify import READY, notify
from tests.checkpoints import make_checkpoint
from tests.serving import serving


def listener(address: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bound.bind(address)
    bound.settimeout(30)
    return bound


def test_a_server_says_when_it_is_ready_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listener(str(tmp_path / "notify")) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with serving(str(make_checkpoint(tmp_path / "model")), "--threads", "1") as served:
            assert manager.recv(100) == b"READY=1"
            assert served.end(signal.SIGTERM) == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener("\0streamserve-test-notify") as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", "@streamserve-test-notify")
        notify(READY)
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["/no/such/socket", "@streamserve-no-manager", "vsock:2:1"])
def test_a_manager_that_cannot_be_reached_is_a_warning(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with caplog.at_level(logging.WARNING):
        notify(READY)
    assert address in caplog.text


def test_without_a_manager_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)
    assert not caplog.records
