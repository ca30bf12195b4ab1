"""Probe ports and connections between two hosts that are one machine: real sockets on loopback."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from distrain.hosts import reachability
from distrain.hosts.reachability import ProbePort, failed_peers
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

NONCE = "0123456789abcdef" * 2


class Host:
    """A host that others can connect to."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.port = ProbePort(loop)

    def failed(self, nonce: str = NONCE, **peers: tuple[str, int]) -> dict[str, str]:
        """The verdict of another host, a thread, on its peers while this one serves its port."""
        found: list[dict[str, str]] = []
        other = threading.Thread(target=lambda: found.append(failed_peers(peers, nonce)))
        other.start()
        while other.is_alive():
            self.loop.call_in("look again", 0.01, lambda: None)
            self.loop.step()
        return found[0]


@pytest.fixture
def host() -> Iterator[Host]:
    loop = Loop()
    host = Host(loop)
    yield host
    host.port.close()
    loop.close()


def test_each_peer_fails_or_not_by_itself(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "CONNECT_TIMEOUT_S", 0.2)
    port = host.port.open("127.0.0.1", NONCE)
    with socket.create_server(("127.0.0.1", 0)) as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        refused = closed.getsockname()
        closed.close()
        there = ("127.0.0.1", port)
        failed = host.failed(good=there, refused=refused, silent=silent.getsockname(), nowhere=("255.255.255.255", 1))
    assert failed.pop("nowhere")
    assert failed == {"refused": "Connection refused", "silent": "no answer within 0.2 s"}


def test_another_program_is_told_apart(host: Host) -> None:
    port = host.port.open("127.0.0.1", NONCE[::-1])
    assert host.failed(other=("127.0.0.1", port)) == {"other": "another program answers there"}


def test_a_port_is_open_for_seconds_only(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "PORT_OPEN_S", 0.05)
    port = host.port.open("127.0.0.1", NONCE)
    began = time.monotonic()
    while time.monotonic() < began + 0.06:
        host.loop.call_in("look again", 0.02, lambda: None)
        host.loop.step()
    assert host.failed(other=("127.0.0.1", port)) == {"other": "Connection refused"}
