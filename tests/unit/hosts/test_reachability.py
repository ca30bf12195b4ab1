"""Probe ports and connections between two hosts that are one machine: real sockets on loopback, in one loop."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.hosts import reachability
from distrain.hosts.reachability import MAX_ECHOED_BYTES, ReachabilityProbe
from distrain.system.background import Background
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NONCE = "0123456789abcdef" * 2


class Host:
    """A host that collects its answers."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.said: list[wire.Message] = []
        self.probe = ReachabilityProbe(loop, Background(None, "resolver"), self.said.append)

    def opens_port(self, address: str = "127.0.0.1", peer: str = "") -> wire.ProbeAddress:
        self.probe.open_port(wire.OpenProbePort(address=address, nonce=NONCE, peer=peer))
        message = self.said.pop()
        assert isinstance(message, wire.ProbeAddress)
        return message

    def reaches(self, **peers: tuple[str, int]) -> dict[str, str]:
        self.probe.probe_peers(wire.ProbePeers(peers=peers, nonce=NONCE))
        self.turn(lambda: self.said)
        message = self.said.pop()
        assert isinstance(message, wire.ProbeResult)
        return message.failed

    def turn(self, done: Callable[[], object]) -> None:
        self.loop.call_in("test", 10.0, lambda: pytest.fail("it took too long"))
        while not done():
            self.loop.step()
        self.loop.cancel("test")


@pytest.fixture
def host() -> Iterator[Host]:
    loop = Loop()
    host = Host(loop)
    yield host
    host.probe.close()
    loop.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_host_that_listens_is_reached(host: Host, address: str) -> None:
    there = host.opens_port(address)
    assert (there.address, there.interface) == (address, "lo")
    assert host.reaches(other=(address, there.port)) == {}


def test_it_listens_on_the_one_address_only(host: Host) -> None:
    there = host.opens_port("127.0.0.1")
    assert host.reaches(other=("127.0.0.2", there.port)) == {"other": "Connection refused"}


def test_a_host_finds_its_own_address_toward_another(host: Host) -> None:
    assert host.opens_port("", peer="127.0.0.9").address == "127.0.0.1"


@pytest.mark.parametrize(("address", "peer"), [("192.0.2.1", ""), ("", "")])
def test_an_address_that_cannot_be_had_is_said(host: Host, address: str, peer: str) -> None:
    there = host.opens_port(address, peer)
    assert there.port == 0
    assert there.failed


def test_each_peer_fails_or_not_by_itself(host: Host) -> None:
    there = host.opens_port()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    failed = host.reaches(good=("127.0.0.1", there.port), refused=("127.0.0.1", port), nowhere=("255.255.255.255", 1))
    assert sorted(failed) == ["nowhere", "refused"]
    assert failed["refused"] == "Connection refused"


def test_a_silent_peer_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "CONNECT_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert host.reaches(silent=silent.getsockname()[:2]) == {"silent": "no answer within 0.1 s"}


def test_who_is_asked_anew_forgets_the_calls_of_before(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host.probe.probe_peers(wire.ProbePeers(peers={"silent": silent.getsockname()[:2]}, nonce="before"))
        host.loop.call_in("look again", 0.0, lambda: None)
        host.loop.step()
        there = host.opens_port()
        assert host.reaches(other=("127.0.0.1", there.port)) == {}
        assert host.said == []


def test_another_program_is_told_apart(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        host.probe.probe_peers(wire.ProbePeers(peers={"other": other.getsockname()[:2]}, nonce=NONCE))
        caller, _ = other.accept()
        with caller:
            caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            host.turn(lambda: host.said)
    assert host.said == [wire.ProbeResult(nonce=NONCE, failed={"other": "another program answers there"})]


def test_without_peers_there_is_nothing_to_wait_for(host: Host) -> None:
    assert host.reaches() == {}


def test_a_stranger_gets_back_what_he_sends_and_no_more(host: Host) -> None:
    there = host.opens_port()
    with socket.create_connection((there.address, there.port)) as stranger:
        stranger.setblocking(False)
        stranger.sendall(b"\0distrain\0" * 100)
        got = b""

        def closed() -> bool:
            nonlocal got
            try:
                data = stranger.recv(4096)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            got += data
            return not data

        host.loop.call_in("look again", 0.0, lambda: None)
        while not closed():
            host.loop.call_in("look again", 0.01, lambda: None)
            host.loop.step()
    assert got == (b"\0distrain\0" * 100)[:MAX_ECHOED_BYTES]
    assert host.reaches(other=(there.address, there.port)) == {}


def test_a_listener_lives_for_seconds_only(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "PORT_OPEN_S", 0.05)
    there = host.opens_port()
    with socket.create_connection((there.address, there.port)):
        began = time.monotonic()
        while time.monotonic() < began + 0.06:
            host.loop.call_in("look again", 0.02, lambda: None)
            host.loop.step()
        assert host.reaches(other=(there.address, there.port)) == {"other": "Connection refused"}
