"""Addresses that ranks reserve by name, with the coordinator's own way to let them meet."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distrain import wire
from distrain.api.context import TrainContext
from distrain.decisions.barriers import BarrierTracker
from distrain.worker import addresses
from distrain.worker.addresses import ReservedAddresses, bypass_proxies

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXT = TrainContext(
    world_rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    run_name="run",
    storage_path="/runs",
    attempt=0,
    devices=(),
)
COORDINATOR, WORKERS = "get_coordinator_address", "get_worker_addresses"


class Ranks:
    """Ranks in threads, and a coordinator that lets them meet."""

    def __init__(self, number: int, **context: int) -> None:
        self.meetings = 0
        self._barriers = BarrierTracker(0, number)
        self._indices = [0] * number
        self._arrived = threading.Condition()
        self._data: dict[int, bytes] = {}
        self.ranks = [
            ReservedAddresses(
                replace(CONTEXT, world_rank=rank, world_size=number, **{"local_world_size": number, **context}),
                self._meet_as(rank),
            )
            for rank in range(number)
        ]

    def _meet_as(self, rank: int) -> Callable[..., bytes]:
        def meet(operation: str, data: bytes, timeout_s: float | None = None, *, gathers: bool = False) -> bytes:
            with self._arrived:
                self._indices[rank] += 1
                index = self._indices[rank]
                asked = wire.CollectiveEntered(
                    attempt=0, rank=rank, index=index, operation=operation, body=data, gathers=gathers
                )
                for end in self._barriers.entered(asked, 0.0):
                    assert end.refused is None
                    self._data[end.rank] = end.body
                    self.meetings = end.index
                    self._arrived.notify_all()
                assert self._arrived.wait_for(lambda: rank in self._data, timeout=10)
                return self._data.pop(rank)

        return meet

    def all(self, call: str, name: str = "default") -> list[list[str]]:
        """The answers of all ranks."""
        answers: dict[int, list[str]] = {}

        def ask(rank: int) -> None:
            answers[rank] = self.ranks[rank].by_name(call, name, on_every_rank=call == WORKERS)

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [answers[rank] for rank in range(len(self.ranks))]


@pytest.fixture(autouse=True)
def _rank_0s_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def test_all_ranks_get_the_same_addresses_in_the_order_of_the_ranks() -> None:
    ranks = Ranks(3)
    for call, number in ((COORDINATOR, 1), (WORKERS, 3)):
        [first, *others] = ranks.all(call)
        assert others == [first] * 2
        assert len(set(first)) == number
        assert all(address.startswith("127.0.0.1:") for address in first)


def test_the_same_name_needs_no_further_meeting() -> None:
    """So that one rank may ask again."""
    ranks = Ranks(2)
    before = ranks.all(COORDINATOR, "jax")
    assert ranks.ranks[1].by_name(COORDINATOR, "jax") == before[1]
    before[1].clear()  # the caller's own
    assert ranks.ranks[1].by_name(COORDINATOR, "jax") == before[0]
    assert ranks.meetings == 1


def test_another_name_has_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the system would give the same one again, as nobody listens there yet."""
    reserve, first = addresses.reserve_port, list[int]()

    def reserve_the_same() -> socket.socket:
        if first:
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", first.pop()))
            return held
        return reserve()

    ranks = Ranks(1)
    [[one]] = ranks.all(COORDINATOR, "one")
    first.append(int(one.rpartition(":")[2]))
    monkeypatch.setattr(addresses, "reserve_port", reserve_the_same)
    [[two]] = ranks.all(COORDINATOR, "two")
    assert first == []
    assert one != two
    assert ranks.all(WORKERS, "one") != [[one]]


def test_the_port_is_free_for_a_server_without_so_reuseaddr() -> None:
    [[address]] = Ranks(1).all(COORDINATOR)
    with closing(socket.socket()) as server:
        server.bind(("", int(address.rpartition(":")[2])))
        server.listen()


def test_the_host_of_rank_0_is_that_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(1)
    monkeypatch.setenv("MASTER_ADDR", "somewhere.invalid")
    assert ranks.all(COORDINATOR)[0][0].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("rank_0s_host", "toward", "local", "host"),
    [
        ("localhost", "127.0.0.1", 2, "127.0.0.1"),
        ("alpha", "127.0.1.1", 1, "alpha"),
        ("alpha", "10.0.0.2", 1, "10.0.0.2"),
        ("fd77::1", "fd77::2", 1, "[fd77::2]"),
    ],
    ids=["all ranks on one host", "the name of the host itself", "another host", "IPv6"],
)
def test_a_rank_is_known_by_the_address_from_which_it_reaches_rank_0(
    monkeypatch: pytest.MonkeyPatch, rank_0s_host: str, toward: str, local: int, host: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", rank_0s_host)
    monkeypatch.setattr(addresses, "address_toward", {rank_0s_host: toward}.__getitem__)
    [[first, second], _] = Ranks(2, local_world_size=local).all(WORKERS)
    assert {first.rpartition(":")[0], second.rpartition(":")[0]} == {host}


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError, match=r"get_coordinator_address\(name\) must be a str, got 3"):
        Ranks(1).ranks[0].by_name(COORDINATOR, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "without"),
    [
        ({}, ""),
        ({"no_proxy": "a"}, ""),
        ({"http_proxy": "p"}, "10.0.0.1,fd77::12"),
        ({"http_proxy": "p", "no_proxy": "a,b"}, "a,b,10.0.0.1,fd77::12"),
        ({"grpc_proxy": "p", "no_proxy": "a", "no_grpc_proxy": "c"}, "c,10.0.0.1,fd77::12"),
    ],
)
def test_grpc_reaches_the_ranks_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], without: str
) -> None:
    """gRPC knows IPv6 addresses without their brackets."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.setenv(name, variables.get(name, ""))
    bypass_proxies(["10.0.0.1:5000", "10.0.0.1:5001", "[fd77::12]:5000"])
    assert os.environ[addresses._WITHOUT_PROXY] == without
