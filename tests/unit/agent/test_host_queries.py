"""Questions of the coordinator about a host, answered on this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.agent.host_queries import HostQueries
from distrain.system.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator


class Host:
    """This host, and its answers."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.answers: list[wire.HostProbed] = []
        self.queries = HostQueries(self.loop, self._take)

    def _take(self, answer: wire.Message) -> None:
        assert isinstance(answer, wire.HostProbed)
        self.answers.append(answer)

    def answer(self, question: wire.ProbeHost) -> wire.HostProbed:
        self.queries.probe(question)
        return self.wait(len(self.answers) + 1)

    def wait(self, count: int) -> wire.HostProbed:
        while len(self.answers) < count:
            self.loop.step()
        return self.answers[-1]


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.queries._port.close()
    host.loop.close()


def test_hosts_connect_to_each_other(host: Host) -> None:
    there = host.answer(wire.ProbeHost(nonce="nonce", is_reached=True, address="127.0.0.1"))
    assert (there.address, there.interface, there.failed) == ("127.0.0.1", "lo", None)
    peers = {"here": ("127.0.0.1", there.port), "nowhere": ("127.0.0.2", there.port)}
    answer = host.answer(wire.ProbeHost(nonce="nonce", peers=peers))
    assert answer.failed_peers == {"nowhere": "Connection refused"}


@pytest.mark.parametrize("address", ["192.0.2.1", ""])
def test_an_address_that_cannot_be_had_is_said(host: Host, address: str) -> None:
    there = host.answer(wire.ProbeHost(nonce="nonce", is_reached=True, address=address))
    assert (there.address, there.port) == ("", 0)
    assert there.failed is not None
    assert "no interface has" in there.failed or "Name or service not known" in there.failed
