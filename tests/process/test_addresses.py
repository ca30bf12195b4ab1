"""Addresses that real workers reserve by name, and listen at."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

import distrain
from distrain import FailureConfig
from tests.process.conftest import reported

if TYPE_CHECKING:
    from tests.process.conftest import Fit


def place_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_every_rank_can_be_reached_and_a_restart_has_new_addresses(any_fit: Fit) -> None:
    def train() -> list[list[str]]:
        context = distrain.get_context()
        rank, is_first = context.get_world_rank(), distrain.get_checkpoint() is None
        addresses = context.get_worker_addresses("peers")
        with socket.create_server(place_of(addresses[rank])) as server:
            distrain.collective.barrier()
            socket.create_connection(place_of(addresses[1 - rank]), timeout=10).close()
            server.accept()[0].close()
        asked_again = context.get_worker_addresses("peers") if rank == 1 else addresses
        metrics = {"first": is_first, "coordinator": context.get_coordinator_address(), "peers": asked_again}
        distrain.report(metrics, distrain.Checkpoint.from_dict({}))
        if is_first and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return []

    result = any_fit(train, failure_config=FailureConfig(max_failures=1))
    ranks = [reported(result.path, rank) for rank in (0, 1)]
    assert [line["first"] for line in ranks[0]] == [True, False]
    assert ranks[0] == ranks[1]
    attempts = [[line["coordinator"], *line["peers"]] for line in ranks[0]]
    assert [len({place_of(address)[1] for address in addresses}) for addresses in attempts] == [3, 3]
    assert attempts[0] != attempts[1]  # one of the ports may come again by chance
